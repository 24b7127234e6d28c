"""The command `weightplane`: what is in it, and how it ends.

Nothing heavy is imported before a command needs it: `--help` answers at once on a machine without torch or vLLM.
Each command ends with a code of `controlplane.exit_codes`; an expected error is one line on stderr, never a traceback.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from controlplane.cli import (
    certs,
    credentials,
    daemons,
    doctor,
    engines,
    health,
    ledger,
    plan,
    rollback,
    sim,
    status,
    updates,
    verify,
    watch,
)
from controlplane.cli.demo.command import demo
from controlplane.cli.up.command import up

app = typer.Typer(
    name="weightplane",
    help="Carries weights from RL trainers to rollout engines; nothing is served under a version that it is not.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(short_help="Run the coordinator.")(daemons.coordinator)
app.command(short_help="Run an engine agent with its engine.")(daemons.engine)
app.command(short_help="Run a trainer agent with its training ranks.")(daemons.trainer)
app.command(short_help="Start a fleet file on this machine.")(up)
app.command(short_help="Train a small model on this machine.")(demo)
app.command(short_help="Show engines, trainers and updates.")(status.status)
app.command(short_help="Show the fleet live.")(watch.watch)
app.command(short_help="Show the last updates.")(updates.updates)
app.command(short_help="Say what an update waits for, or waited for.")(updates.why)
app.command(short_help="Compare what engines hold with what the fleet serves.")(verify.verify)
app.command(short_help="Look for what is wrong with this machine.")(doctor.doctor)
app.command(short_help="Show what an update would do and cost, without doing it.")(plan.plan)
app.command(short_help="Bring an earlier version's weights back.")(rollback.rollback)
app.command(short_help="Ask a daemon whether it serves.")(health.health)
app.command(short_help="Simulate a fleet with faults.")(sim.sim)
app.add_typer(
    engines.app, name="engines", short_help="Show each engine's versions and conditions; keep, drain, pause one."
)
app.add_typer(ledger.app, name="ledger", short_help="Look into a ledger, or accept an older one.")
app.add_typer(certs.certs, name="certs", short_help="Make certificates.")
app.add_typer(certs.token, name="token", short_help="Make tokens, for callers without certificates.")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"weightplane {version('weightplane')}")
        raise typer.Exit


@app.callback()
def weightplane(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
    tls_ca: credentials.Ca = None,
    tls_cert: credentials.Cert = None,
    tls_key: credentials.Key = None,
    tls_server_name: credentials.ServerName = "",
    token_file: credentials.Token = None,
) -> None:
    """Carries weights from RL trainers to rollout engines; nothing is served under a version that it is not."""
    credentials.give(tls_ca, tls_cert, tls_key, tls_server_name, token_file)


def main() -> None:
    """Entry point. Ends by SystemExit with the command's code."""
    app(prog_name="weightplane")


if __name__ == "__main__":
    main()

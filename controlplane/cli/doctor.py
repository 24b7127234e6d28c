"""`weightplane doctor`: what is wrong here, and what to do about it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli.bar import bar
from controlplane.cli.credentials import credentials
from controlplane.cli.ending import reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout, new_console
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from controlplane.cli.doctor_checks import Check
    from controlplane.cli.doctor_config import Daemon
    from controlplane.rpc.security import TlsSettings

STYLES = {"good": "green", "note": "yellow", "bad": "bold red"}


@reported
def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="A daemon's settings or a fleet file: look at its certificates."),
    ] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Try each transport too, from here, as a trainer's ranks would.")
    ] = False,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, whose keys stay as they are.")] = False,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Look at this machine and at its way to the fleet: versions, shared memory, limits, certificates, ports, clocks.

    Changes nothing. Run it where an agent is to run, in its environment. Ends with 1 if something is wrong.
    """
    from controlplane.cli.doctor_checks import Verdict, of_this_host
    from controlplane.rpc.logs import configure_logging

    configure_logging("doctor", level="ERROR")  # the agents' code that is tried speaks of links; the table does too
    daemons, refused = _daemons(config)
    found = [*of_this_host(), *refused, *_certificates(daemons)]
    found += asyncio.run(_of_others(coordinator, timeout, _shown_by(daemons), link=link))
    if link:
        from controlplane.cli.doctor_links import of_links

        host = next((d.link_host for d in daemons if d.link_host), "")
        root = next((d.checkpoint_root for d in daemons if d.checkpoint_root), None)
        with bar("trying links", quiet=as_json) as trying:
            found += of_links(host, root, lambda name: trying(said=name))
    if as_json:
        typer.echo(json.dumps(checks_json(found), indent=2))
    else:
        new_console().print(render_checks(found))
    return ExitCode.FAILED if any(c.verdict is Verdict.BAD for c in found) else ExitCode.OK


def _daemons(config: Path | None) -> tuple[list[Daemon], list[Check]]:
    """Of the file, and what its daemon would refuse it for."""
    from controlplane.cli.doctor_checks import Check, Verdict
    from controlplane.cli.doctor_config import daemons_of
    from controlplane.config import ConfigError
    from controlplane.core.errors import WeightplaneError

    if config is None:
        return [], []
    try:
        daemons = daemons_of(config)
    except (ConfigError, WeightplaneError) as error:
        advice = "it does not start with this: change what is named"
        return [], [Check("settings", Verdict.BAD, str(error), advice)]
    return daemons, [Check("settings", Verdict.GOOD, f"{config}: {', '.join(map(str, daemons[:5]))}")]


def _certificates(daemons: list[Daemon]) -> list[Check]:
    """Of the file's daemons; without a file, of what the command itself shows."""
    from controlplane.cli.doctor_certificates import of_daemons, of_files

    if not daemons and credentials().ca is None and credentials().token is None:
        return []
    return of_daemons(daemons) if daemons else of_files("this command", credentials())


def _shown_by(daemons: list[Daemon]) -> TlsSettings:
    """Links are tried as the file's first daemon, else as this command."""
    return daemons[0].tls if daemons else credentials()


async def _of_others(coordinator: str, timeout: float, tls: TlsSettings, *, link: bool) -> list[Check]:
    from controlplane.cli.ask import get_fleet
    from controlplane.cli.doctor_fleet import of_fleet
    from controlplane.cli.doctor_links import of_engines
    from controlplane.cli.ending import CommandFailed

    found = await of_fleet(coordinator, timeout)
    if not link:
        return found
    try:
        return found + await of_engines(await get_fleet(coordinator, timeout), tls, timeout)
    except CommandFailed:
        return found  # it says already that the coordinator is not reached


def render_checks(found: list[Check]) -> RenderableType:
    from rich.text import Text

    from controlplane.cli.tables import add_row, new_table

    table = new_table("CHECK", "VERDICT", "FOUND", "WHAT TO DO")
    for check in found:
        word = check.verdict.value
        add_row(table, check.name, Text(word, style=STYLES[word]), check.found, check.advice)
    return table


def checks_json(found: list[Check]) -> dict[str, object]:
    """Keys are only ever added."""
    checks = [{"name": c.name, "verdict": c.verdict.value, "found": c.found, "advice": c.advice} for c in found]
    return {"good": all(c.verdict.value != "bad" for c in found), "checks": checks}

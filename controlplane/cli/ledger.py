"""`weightplane ledger`: look into a coordinator's ledger while it does not run; accept an older copy while it does."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli.bar import bar
from controlplane.cli.ending import reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from weightplane.v1 import operator_pb2

StateDir = Annotated[Path, typer.Option("--state-dir", metavar="DIR", help="The coordinator's directory.")]
DEFAULT = Path("weightplane-state")
MAX_NAME_LENGTH = 128

app = typer.Typer(
    help="Look into a coordinator's ledger while it does not run, or accept an older copy while it does.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
@reported
def verify(state_dir: StateDir = DEFAULT) -> int:
    """Say what cannot be true of the ledger. Ends with 0 if all is well, with 1 if not."""
    from controlplane.ledger import inspect

    with bar("looking at the ledger") as looking:
        problems = inspect.verify(state_dir / "ledger.sqlite", lambda part: looking(said=part))
    for problem in problems:
        typer.echo(problem)
    if not problems:
        typer.echo("the ledger is whole")
    return ExitCode.FAILED if problems else ExitCode.OK


@app.command()
@reported
def dump(state_dir: StateDir = DEFAULT) -> int:
    """Print everything as JSON."""
    from controlplane.ledger import inspect

    typer.echo(json.dumps(inspect.dump(state_dir / "ledger.sqlite"), indent=2))
    return ExitCode.OK


@app.command(short_help="Accept an older copy, while the coordinator runs.")
@reported
def accept(
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    by: Annotated[
        str | None, typer.Option("--by", metavar="NAME", help="Who accepts it, for the ledger.  [default: user@host]")
    ] = None,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Take the running coordinator's ledger as it is, though agents know of later numbers or terms (LEDGER_REGRESSED).

    Putting the newer ledger back is better. Accept this one only when that is lost, and when every engine is connected:
    what nobody tells is not known. Nothing up to what they told of is given again; what the lost part served is not
    served any more, until the next push.
    """
    before, accepted = asyncio.run(_accept(coordinator, (by or _me())[:MAX_NAME_LENGTH], timeout))
    if before.ledger_regressed:
        typer.echo(f"accepted, though {before.ledger_regressed.partition('; ')[0]}")
    else:
        typer.echo("nothing was to be accepted: no agent knows more than the ledger")
    silent = [e.status.engine.engine_id for e in before.engines if not e.known]
    if silent:
        typer.echo(f"not connected, and not asked what they know: {', '.join(silent)}")
    typer.echo(f"coordinator term {accepted.coordinator_term}, next number {accepted.next_number}")
    return ExitCode.OK


async def _accept(
    coordinator: str, by: str, timeout: float
) -> tuple[operator_pb2.FleetView, operator_pb2.AcceptLedgerResponse]:
    """What there was to accept, and from where on it goes."""
    from controlplane.cli.ask import asking, get_fleet
    from weightplane.v1 import operator_pb2, operator_pb2_grpc

    before = await get_fleet(coordinator, timeout)
    async with asking(coordinator) as channel:
        request = operator_pb2.AcceptLedgerRequest(run_id=before.run_id, accepted_by=by)
        accepted = await operator_pb2_grpc.OperatorStub(channel).AcceptLedger(request, timeout=timeout)
    return before, accepted


def _me() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"

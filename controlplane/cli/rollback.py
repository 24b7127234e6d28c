"""`weightplane rollback`: an earlier version's weights come back under a new number, and one watches them come."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli.bar import bar
from controlplane.cli.ending import CommandFailed, reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout, new_console
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    import grpc

    from weightplane.v1 import fleet_pb2, operator_pb2

SILENCE_SECONDS = 30.0
"""How long the coordinator may be away while the rollback is watched: a restart, not an end."""
AGAIN_SECONDS = 0.5


@reported
def rollback(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model.")],
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="Number of the version to bring back.", min=1)],
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Bring an earlier version's weights back to every engine, from its checkpoint, as a new and higher number.

    Follows it and prints what becomes of each engine. Ends with 0 only if it was committed; leaving with Ctrl-C
    changes nothing.
    """
    state = asyncio.run(_rollback(coordinator, model, number, timeout))
    from controlplane.cli.rollback_table import render_outcomes, verdict
    from weightplane.v1 import fleet_pb2

    typer.echo("")
    new_console().print(render_outcomes(state))
    typer.echo(verdict(state))
    return ExitCode.OK if state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED else ExitCode.FAILED


async def _rollback(coordinator: str, model: str, number: int, timeout: float) -> fleet_pb2.UpdateState:
    from controlplane.cli.ask import asking, get_fleet
    from controlplane.cli.fleet_table import version_text

    view = await get_fleet(coordinator, timeout)
    async with asking(coordinator) as channel:
        begun = await _begin(channel, view, model, number, timeout)
        new, restored = version_text(begun.version), version_text(begun.restores)
        typer.echo(f"version {new} brings back {restored} (update {begun.update_id})")
        return await _follow(channel, view.run_id, begun.update_id)


async def _begin(
    channel: grpc.aio.Channel, view: operator_pb2.FleetView, model: str, number: int, timeout: float
) -> operator_pb2.RollbackResponse:
    import grpc

    from controlplane.cli.fleet_table import version_text
    from controlplane.core.errors import CheckpointUnknown
    from controlplane.rpc.errors import from_rpc_error
    from weightplane.v1 import operator_pb2, operator_pb2_grpc

    request = operator_pb2.RollbackRequest(run_id=view.run_id, model=model, number=number, request_id=uuid.uuid4().hex)
    try:
        response: operator_pb2.RollbackResponse = await operator_pb2_grpc.OperatorStub(channel).Rollback(
            request, timeout=timeout
        )
    except grpc.aio.AioRpcError as broken:
        error = from_rpc_error(broken)
        if not isinstance(error, CheckpointUnknown):
            raise
        known = ", ".join(version_text(c.version) for c in view.checkpoints if c.model == model) or "none"
        raise CommandFailed(ExitCode.FAILED, f"{error.reason}: {error}; known are: {known}") from broken
    return response


async def _follow(channel: grpc.aio.Channel, run_id: str, update_id: str) -> fleet_pb2.UpdateState:
    """Print each change until the decision; over a restart of the coordinator too."""
    import grpc

    from controlplane.cli.rollback_table import changes
    from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

    fleet = fleet_pb2_grpc.FleetStub(channel)
    request = fleet_pb2.WatchUpdateRequest(run_id=run_id, update_id=update_id)
    state, heard = fleet_pb2.UpdateState(), time.monotonic()
    with bar("waiting for engines", 1.0) as share:
        while state.phase not in _decided():
            try:
                async for response in fleet.WatchUpdate(request):
                    for line in changes(state, response.state):
                        typer.echo(line)
                    state, heard = response.state, time.monotonic()
                    share(*_share_ended(state))
            except grpc.aio.AioRpcError as broken:
                away = broken.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                if not away or time.monotonic() - heard > SILENCE_SECONDS:
                    raise
                share(_share_ended(state)[0], "the coordinator does not answer")
            if state.phase not in _decided():
                await asyncio.sleep(AGAIN_SECONDS)
    return state


def _share_ended(state: fleet_pb2.UpdateState) -> tuple[float, str]:
    """Of the engines: those about which nothing more is waited for."""
    from controlplane.cli.why_text import ENDED

    ended = sum(o.lost or o.stage in ENDED for o in state.engines)
    return ended / max(1, len(state.engines)), f"{ended} of {len(state.engines)}"


def _decided() -> tuple[int, ...]:
    from weightplane.v1 import fleet_pb2

    return fleet_pb2.UPDATE_PHASE_COMMITTED, fleet_pb2.UPDATE_PHASE_DEGRADED, fleet_pb2.UPDATE_PHASE_FAILED

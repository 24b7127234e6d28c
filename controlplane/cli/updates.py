"""`weightplane updates`, and `weightplane why UPDATE`: what became of them, and what one waits for."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli.ending import CommandFailed, reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout, new_console
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from weightplane.v1 import fleet_pb2, operator_pb2

AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON, whose keys stay as they are.")]
LATEST = "latest"
STACK_SECONDS = 12.0
"""An agent looks at several processes, some seconds each."""


@reported
def updates(
    limit: Annotated[int, typer.Option("--limit", metavar="NUMBER", help="How many, newest first.", min=1)] = 20,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    as_json: AsJson = False,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Show the last updates: when each began, went and was decided, and what became of it."""
    from controlplane.cli.ask import get_fleet
    from controlplane.cli.updates_table import render_updates, seconds_of, updates_json

    view = asyncio.run(get_fleet(coordinator, timeout))
    if as_json:
        typer.echo(json.dumps(updates_json(view, limit), indent=2))
    else:
        new_console().print(render_updates(view, limit, seconds_of(view.time)))
    return ExitCode.OK


@reported
def why(
    update: Annotated[
        str, typer.Argument(metavar="UPDATE", help="Its id or how that begins, its version (7, or 1.7), or: latest.")
    ] = LATEST,
    stacks: Annotated[
        bool,
        typer.Option("--stacks", help="Show what processes were doing when its limit came, and do now if it is open."),
    ] = False,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    as_json: AsJson = False,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Say what an update waits for, or where its time went: the phase, the processes, the bytes so far."""
    from controlplane.cli.ask import get_fleet
    from controlplane.cli.updates_table import seconds_of
    from controlplane.cli.why_text import render_why, waits, why_json

    view = asyncio.run(get_fleet(coordinator, timeout))
    found, now = find(view, update), seconds_of(view.time)
    if as_json:
        kept = {"stacks": asyncio.run(_kept(coordinator, timeout, found.update_id))} if stacks else {}
        typer.echo(json.dumps(why_json(view, found, now) | kept, indent=2))
        return ExitCode.OK
    new_console().print(render_why(view, found, now))
    if stacks:
        names = {w.who for w in waits(view, found, now)}
        for text in asyncio.run(_all_stacks(coordinator, timeout, view, found.update_id, names)):
            typer.echo(f"\n{text}")
    return ExitCode.OK


def find(view: operator_pb2.FleetView, wanted: str) -> fleet_pb2.UpdateState:
    """Raises CommandFailed: there is none, or the beginning of an id is that of several."""
    from controlplane.cli.fleet_table import version_text

    if wanted == LATEST:
        found = list(view.updates[:1])
    else:
        found = [u for u in view.updates if wanted in (str(u.version.number), version_text(u.version))]
        found = found or [u for u in view.updates if u.update_id.startswith(wanted)]
    if not found:
        text = (
            "no update is known"
            if wanted == LATEST
            else f"no update {wanted} is known; `weightplane updates` lists them"
        )
        raise CommandFailed(ExitCode.FAILED, text)
    if len({u.update_id for u in found}) > 1:
        raise CommandFailed(ExitCode.FAILED, f"{wanted} is several: {', '.join(u.update_id for u in found)}")
    return found[0]


async def _all_stacks(
    coordinator: str, timeout: float, view: operator_pb2.FleetView, update_id: str, names: set[str]
) -> list[str]:
    return [*await _kept(coordinator, timeout, update_id), *await _stacks(view, names)]


async def _kept(coordinator: str, timeout: float, update_id: str) -> list[str]:
    """What the coordinator was told when the update's limit came; kept after its decision too."""
    from controlplane.cli.ask import asking
    from controlplane.cli.updates_table import seconds_of
    from controlplane.core.errors import WeightplaneError
    from weightplane.v1 import operator_pb2, operator_pb2_grpc

    try:
        async with asking(coordinator) as channel:
            request = operator_pb2.GetStacksRequest(update_id=update_id)
            kept = await operator_pb2_grpc.OperatorStub(channel).GetStacks(request, timeout=timeout)
    except (CommandFailed, WeightplaneError) as error:
        return [f"no stacks are told: {error}"]
    if not kept.processes:
        return ["no stacks were kept: no limit came, or it is long ago, or the coordinator was started since"]
    at = datetime.fromtimestamp(seconds_of(kept.report_time)).astimezone().isoformat(timespec="seconds")
    each = [f"{p.name} (pid {p.pid}):\n{p.text or p.problem}" for p in kept.processes]
    return [f"when its limit came, at {at}:", *each]


async def _stacks(view: operator_pb2.FleetView, names: set[str]) -> list[str]:
    """Of each engine that is heard, asked at once; what is not answered is said to be so."""
    heard = [e for e in view.engines if e.known and e.status.engine.engine_id in names]
    return list(await asyncio.gather(*(_stack(view.run_id, e) for e in heard)))


async def _stack(run_id: str, engine: operator_pb2.EngineView) -> str:
    from controlplane.cli.ask import asking
    from controlplane.core.errors import WeightplaneError
    from weightplane.v1 import lifecycle_pb2, lifecycle_pb2_grpc

    name = engine.status.engine.engine_id
    try:
        async with asking(engine.endpoint) as channel:
            request = lifecycle_pb2.DumpStacksRequest(run_id=run_id)
            answer = await lifecycle_pb2_grpc.LifecycleStub(channel).DumpStacks(request, timeout=STACK_SECONDS)
    except (CommandFailed, WeightplaneError) as error:
        return f"{name}: no stacks: {error}"
    return "\n".join(f"{name}, {p.name} (pid {p.pid}):\n{p.text or p.problem}" for p in answer.processes)

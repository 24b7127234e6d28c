"""`weightplane verify`: ask each engine's own agent what it holds, and compare it with what the fleet serves."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli.bar import bar
from controlplane.cli.ending import CommandFailed, reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout, new_console
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from controlplane.cli.verify_fleet import Said
    from weightplane.v1 import operator_pb2

AT_ONCE = 32
"""Agents that are asked side by side."""


@reported
def verify(
    model: Annotated[str, typer.Option("--model", help="Only engines of this model.")] = "",
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, whose keys stay as they are.")] = False,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Ask each engine what it holds, and compare versions and contents with what the fleet serves.

    Ends with 0 only if there are engines, each was heard, and each holds just what it should.
    """
    from controlplane.cli.verify_fleet import compare, findings_json, render_findings

    view, said = asyncio.run(_ask(coordinator, model, timeout, quiet=as_json))
    findings = compare(view, said)
    if as_json:
        typer.echo(json.dumps(findings_json(view, findings), indent=2))
    else:
        new_console().print(render_findings(findings))
    return ExitCode.OK if findings and all(f.good for f in findings) else ExitCode.FAILED


async def _ask(
    coordinator: str, model: str, timeout: float, *, quiet: bool
) -> tuple[operator_pb2.FleetView, dict[str, Said]]:
    """The view comes first: what an engine has applied since is then seen as a difference."""
    from controlplane.cli.ask import get_fleet

    view = await get_fleet(coordinator, timeout)
    if model:
        others = [e for e in view.engines if e.status.model == model]
        del view.engines[:]
        view.engines.extend(others)
    turns = asyncio.Semaphore(AT_ONCE)
    with bar("asking engines", len(view.engines), quiet=quiet) as answered:

        async def asked(engine: operator_pb2.EngineView) -> Said:
            said = await _status(view.run_id, engine, turns, timeout)
            answered(said=engine.status.engine.engine_id)
            return said

        said = await asyncio.gather(*map(asked, view.engines))
    return view, dict(zip((e.status.engine.engine_id for e in view.engines), said, strict=True))


async def _status(run_id: str, engine: operator_pb2.EngineView, turns: asyncio.Semaphore, timeout: float) -> Said:
    from controlplane.cli.ask import asking
    from controlplane.core.errors import WeightplaneError
    from weightplane.v1 import lifecycle_pb2, lifecycle_pb2_grpc

    try:
        async with turns, asking(engine.endpoint) as channel:
            request = lifecycle_pb2.GetStatusRequest(run_id=run_id)
            answer = await lifecycle_pb2_grpc.LifecycleStub(channel).GetStatus(request, timeout=timeout)
    except (CommandFailed, WeightplaneError) as error:
        return str(error)
    return answer.status

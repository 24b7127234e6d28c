"""`weightplane plan`: what the next update would do and cost, without doing anything."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from controlplane.cli.ending import reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout, new_console
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from weightplane.v1 import operator_pb2

AskedTransport = Literal["shared_memory", "inline", "broadcast", "cuda_ipc"]
AskedFate = Literal["shared", "per_engine"]


@reported
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model, if more than one has a trainer.")] = "",
    transport: Annotated[
        AskedTransport | None, typer.Option("--transport", help="As if the coordinator's setting were this.")
    ] = None,
    link_fate: Annotated[
        AskedFate | None, typer.Option("--link-fate", help="As if the coordinator's setting were this.")
    ] = None,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, whose keys stay as they are.")] = False,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Show the plan that an update would get now: who sends to whom, by which transport, why, and what it costs.

    Nothing is done and no number is used. Ends with 1 if the update would be refused.
    """
    from controlplane.cli.plan_table import plan_json, render_plan

    found = asyncio.run(_ask(coordinator, model, transport, link_fate, timeout))
    if as_json:
        typer.echo(json.dumps(plan_json(found), indent=2))
    else:
        new_console().print(render_plan(found))
    return ExitCode.FAILED if found.problems else ExitCode.OK


async def _ask(
    address: str, model: str, transport: str | None, fate: str | None, timeout: float
) -> operator_pb2.PlanResponse:
    from controlplane.cli.ask import asking
    from weightplane.v1 import operator_pb2, operator_pb2_grpc, weight_update_pb2

    request = operator_pb2.PlanRequest(model=model)
    if transport is not None:
        request.transport = weight_update_pb2.Transport.Value(f"TRANSPORT_{transport.upper()}")
    if fate is not None:
        request.link_fate = weight_update_pb2.LinkFate.Value(f"LINK_FATE_{fate.upper()}")
    async with asking(address) as channel:
        response: operator_pb2.PlanResponse = await operator_pb2_grpc.OperatorStub(channel).Plan(
            request, timeout=timeout
        )
    return response

"""`weightplane status`: the fleet as the coordinator knows it, once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli.ending import reported
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from weightplane.v1 import operator_pb2

WIDTH_OF_FILES = 240
"""A pipe or a file has no width: one engine is one line there."""


@reported
def status(
    coordinator: Annotated[
        str, typer.Option("--coordinator", metavar="HOST:PORT", help="Whom to ask.")
    ] = "127.0.0.1:7070",
    as_json: Annotated[bool, typer.Option("--json", help="Print the coordinator's answer as JSON.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Longest wait.")] = 5.0,
) -> int:
    """Show engines, trainers and the last updates."""
    view = asyncio.run(_get_fleet(coordinator, timeout))
    if as_json:
        from google.protobuf.json_format import MessageToJson

        typer.echo(MessageToJson(view, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return ExitCode.OK
    import time

    from rich.console import Console

    from controlplane.cli.fleet_table import render_fleet

    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    console.print(render_fleet(view, time.time()))
    return ExitCode.OK


async def _get_fleet(coordinator: str, timeout: float) -> operator_pb2.FleetView:
    from controlplane.cli.ask import asking
    from weightplane.v1 import operator_pb2, operator_pb2_grpc

    async with asking(coordinator) as channel:
        stub = operator_pb2_grpc.OperatorStub(channel)
        answer = await stub.GetFleet(operator_pb2.GetFleetRequest(), timeout=timeout)
    return answer.fleet

"""`weightplane watch`: the fleet, live, until Ctrl-C.

On a terminal one screen that is drawn anew at each change; elsewhere one line for each thing that happens, or with
`--json` one state a line. A coordinator that goes away is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli.ending import CommandFailed, reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout, new_console
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from weightplane.v1 import operator_pb2

DRAWS_PER_SECOND = 4
RECONNECT_SECONDS = 1.0


@reported
def watch(
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the coordinator's answer at each change, one line of JSON each.")
    ] = False,
    count: Annotated[
        int, typer.Option("--count", metavar="NUMBER", help="End after so many states. 0: never.", min=0)
    ] = 0,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Show the fleet, its updates and what happens, live, until Ctrl-C."""
    console = new_console()
    if as_json:
        asyncio.run(_json_lines(coordinator, count, timeout))
    elif console.is_terminal:
        asyncio.run(_screen(coordinator, count, timeout))
    else:
        asyncio.run(_event_lines(coordinator, count, timeout))
    return ExitCode.OK


async def _states(coordinator: str, count: int, timeout: float) -> AsyncIterator[operator_pb2.FleetView | str]:
    """Views; and a text for each time that the coordinator went away. Raises CommandFailed: it was never there."""
    from controlplane.cli.ask import asking
    from controlplane.rpc.errors import RemoteError
    from weightplane.v1 import operator_pb2, operator_pb2_grpc

    seen = 0
    while True:
        try:
            async with asking(coordinator) as channel:
                call = operator_pb2_grpc.OperatorStub(channel).WatchFleet(operator_pb2.WatchFleetRequest())
                async with asyncio.timeout(None if seen else timeout) as limit:
                    async for answer in call:
                        limit.reschedule(None)
                        seen += 1
                        yield answer.fleet
                        if seen == count:
                            return
        except TimeoutError as error:
            raise CommandFailed(ExitCode.UNREACHABLE, f"nobody answers at {coordinator} in {timeout:g} s") from error
        except CommandFailed as error:
            if not seen or error.code is not ExitCode.UNREACHABLE:
                raise
            yield str(error)
        except RemoteError as error:
            if not seen or error.code != "CANCELLED":  # how a coordinator that stops in order ends its streams
                raise
            yield "the coordinator stops"
        await asyncio.sleep(RECONNECT_SECONDS)


async def _json_lines(coordinator: str, count: int, timeout: float) -> None:
    from google.protobuf.json_format import MessageToJson

    async for state in _states(coordinator, count, timeout):
        if not isinstance(state, str):
            text = MessageToJson(
                state, indent=None, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
            typer.echo(text)


async def _event_lines(coordinator: str, count: int, timeout: float) -> None:
    from controlplane.cli.watch_screen import event_line, fresh

    before: operator_pb2.FleetView | None = None
    async for state in _states(coordinator, count, timeout):
        if isinstance(state, str):
            typer.echo(state, err=True)
            continue
        for event in fresh(before, state):
            typer.echo(event_line(event))
        before = state


async def _screen(coordinator: str, count: int, timeout: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from controlplane.cli.updates_table import seconds_of
    from controlplane.cli.watch_screen import render_watch

    console = Console()
    with Live(console=console, screen=True, refresh_per_second=DRAWS_PER_SECOND) as live:
        view: operator_pb2.FleetView | None = None
        async for state in _states(coordinator, count, timeout):
            gone = state if isinstance(state, str) else ""
            view = view if isinstance(state, str) else state
            if view is not None:
                live.update(render_watch(view, seconds_of(view.time), console.height, gone))
        live.refresh()

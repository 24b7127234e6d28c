"""`weightplane status`: the fleet as the coordinator knows it, once."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from controlplane.cli.ending import reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout, new_console
from controlplane.exit_codes import ExitCode


@reported
def status(
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print the coordinator's answer as JSON.")] = False,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Show engines, trainers and the last updates."""
    from controlplane.cli.ask import get_fleet

    view = asyncio.run(get_fleet(coordinator, timeout))
    if as_json:
        from google.protobuf.json_format import MessageToJson

        typer.echo(MessageToJson(view, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return ExitCode.OK
    from controlplane.cli.fleet_table import render_fleet

    new_console().print(render_fleet(view, time.time()))
    return ExitCode.OK

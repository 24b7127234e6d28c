"""`weightplane engines`: each engine's versions side by side, and what is true of it, once."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated

import typer

from controlplane.cli.ending import reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout, new_console
from controlplane.exit_codes import ExitCode


@reported
def engines(
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, whose keys stay as they are.")] = False,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Show the version that each engine holds, is to hold and would not take, and what is true of it, since when."""
    from controlplane.cli.ask import get_fleet
    from controlplane.cli.engines_table import engines_json, render_engines

    view = asyncio.run(get_fleet(coordinator, timeout))
    if as_json:
        typer.echo(json.dumps(engines_json(view), indent=2))
    else:
        new_console().print(render_engines(view, time.time()))
    return ExitCode.OK

"""`weightplane engines`: each engine's versions side by side, and what is true of it, once; and what one is told."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated

import typer

from controlplane.cli import engine_commands
from controlplane.cli.ending import reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout, new_console
from controlplane.exit_codes import ExitCode

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def engines(
    context: typer.Context,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, whose keys stay as they are.")] = False,
    timeout: Timeout = DEFAULT_SECONDS,
) -> None:
    """Show the version that each engine holds, is to hold and would not take, and what is true of it, since when.

    With a command: tell one engine something.
    """
    if context.invoked_subcommand is None:
        _show(coordinator, as_json, timeout)


@reported
def _show(coordinator: str, as_json: bool, timeout: float) -> int:
    from controlplane.cli.ask import get_fleet
    from controlplane.cli.engines_table import engines_json, render_engines

    view = asyncio.run(get_fleet(coordinator, timeout))
    if as_json:
        typer.echo(json.dumps(engines_json(view), indent=2))
    else:
        new_console().print(render_engines(view, time.time()))
    return ExitCode.OK


app.command(short_help="Keep it at a version while the fleet moves on.")(engine_commands.keep)
app.command(short_help="Let it go with the fleet again.")(engine_commands.release)
app.command(short_help="Let it finish, and take nothing new.")(engine_commands.drain)
app.command(short_help="Keep its gate shut.")(engine_commands.pause)
app.command(short_help="End a pause or a drain.")(engine_commands.resume)
app.command(short_help="Wake it, though who put it to sleep does not.")(engine_commands.wake)
app.command(short_help="End it in order.")(engine_commands.shutdown)

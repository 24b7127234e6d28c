"""`weightplane doctor`: what is wrong here, and what to do about it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli.ending import reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Coordinator, Timeout, new_console
from controlplane.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from controlplane.cli.doctor_checks import Check

STYLES = {"good": "green", "note": "yellow", "bad": "bold red"}


@reported
def doctor(
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, whose keys stay as they are.")] = False,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Look at this machine and at its way to the fleet: versions, shared memory, limits, ports, clocks.

    Changes nothing. Run it where an agent is to run, in its environment. Ends with 1 if something is wrong.
    """
    from controlplane.cli.doctor_checks import Verdict, of_this_host
    from controlplane.cli.doctor_fleet import of_fleet

    found = [*of_this_host(), *asyncio.run(of_fleet(coordinator, timeout))]
    if as_json:
        typer.echo(json.dumps(checks_json(found), indent=2))
    else:
        new_console().print(render_checks(found))
    return ExitCode.FAILED if any(c.verdict is Verdict.BAD for c in found) else ExitCode.OK


def render_checks(found: list[Check]) -> RenderableType:
    from rich.text import Text

    from controlplane.cli.fleet_table import add_row, new_table

    table = new_table("CHECK", "VERDICT", "FOUND", "WHAT TO DO")
    for check in found:
        word = check.verdict.value
        add_row(table, check.name, Text(word, style=STYLES[word]), check.found, check.advice)
    return table


def checks_json(found: list[Check]) -> dict[str, object]:
    """Keys are only ever added."""
    checks = [{"name": c.name, "verdict": c.verdict.value, "found": c.found, "advice": c.advice} for c in found]
    return {"good": all(c.verdict.value != "bad" for c in found), "checks": checks}

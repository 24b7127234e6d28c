"""The command line of `up`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.ending import reported
from controlplane.exit_codes import ExitCode


@reported
def up(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET", help="The fleet file: TOML, or server groups in YAML.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check it, show what would be started, and end.")] = False,
    on_ray: Annotated[bool, typer.Option("--ray", help="On nodes of the Ray cluster at RAY_ADDRESS.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: JSON on stdout.")] = False,
) -> int:
    """Start the coordinator, engines and trainers of a fleet file on this machine, and keep them running.

    With --ray engines and trainers run where a Ray cluster has room, an engine and the ranks on its devices on one
    node; the coordinator runs here. The fleet file lies at the same path on every node.

    Logs go to STATE_DIR/logs. Ctrl-C ends every process in order; a second one kills them.
    """
    from controlplane.cli.up.run import run_fleet
    from controlplane.cli.up.settings import checked
    from controlplane.cli.up.show import show

    plan = checked(fleet)
    if dry_run:
        show(plan, as_json=as_json)
        return ExitCode.OK
    return run_fleet(plan, fleet, on_ray=on_ray)

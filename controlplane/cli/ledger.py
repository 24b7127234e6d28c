"""`weightplane ledger`: look into a coordinator's ledger while it does not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.ending import reported
from controlplane.exit_codes import ExitCode

StateDir = Annotated[Path, typer.Option("--state-dir", metavar="DIR", help="The coordinator's directory.")]
DEFAULT = Path("weightplane-state")

app = typer.Typer(
    help="Look into a coordinator's ledger while it does not run.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
@reported
def verify(state_dir: StateDir = DEFAULT) -> int:
    """Say what cannot be true of the ledger. Ends with 0 if all is well, with 1 if not."""
    from controlplane.ledger import inspect

    problems = inspect.verify(state_dir / "ledger.sqlite")
    for problem in problems:
        typer.echo(problem)
    if not problems:
        typer.echo("the ledger is whole")
    return ExitCode.FAILED if problems else ExitCode.OK


@app.command()
@reported
def dump(state_dir: StateDir = DEFAULT) -> int:
    """Print everything as JSON."""
    from controlplane.ledger import inspect

    typer.echo(json.dumps(inspect.dump(state_dir / "ledger.sqlite"), indent=2))
    return ExitCode.OK

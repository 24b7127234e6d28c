"""`weightplane sim`: the seeded simulator, which prints what it saw and the seed of what went wrong."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli.ending import reported
from controlplane.exit_codes import ExitCode


@reported
def sim(
    seeds: Annotated[int, typer.Option("--seeds", help="How many, from 0.", min=1)] = 200,
    seed: Annotated[int | None, typer.Option("--seed", help="This one only.")] = None,
    events: Annotated[int, typer.Option("--events", help="Events with faults, each seed.", min=1)] = 2000,
    engines: Annotated[int, typer.Option("--engines", help="Engines of all models together.", min=1)] = 7,
) -> int:
    """Simulate a fleet with faults: lost links, crashes, pauses, zombies. Ends with 1 if an invariant was broken."""
    from controlplane.cli.bar import bar
    from controlplane.sim.runner import run
    from controlplane.sim.scenarios import SCENARIOS
    from controlplane.sim.settings import SimSettings

    chosen = range(seeds) if seed is None else [seed]
    runs = len(chosen) + (len(SCENARIOS) if seed is None else 0)
    with bar("simulating", float(runs)) as told:
        report = run(chosen, events, SimSettings(engines=engines), scenarios=seed is None, told=told)
    typer.echo("\n".join(report.lines()))
    return ExitCode.OK if report.good else ExitCode.FAILED

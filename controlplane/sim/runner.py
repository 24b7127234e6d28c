"""Many seeds, one report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.sim.coverage import Coverage
from controlplane.sim.faults import POINTS
from controlplane.sim.settings import SimSettings
from controlplane.sim.witness import Violation
from controlplane.sim.world import World


@dataclass
class Report:
    """What many worlds came to."""

    seeds: list[int] = field(default_factory=list)
    events: int = 0
    simulated_seconds: float = 0.0
    tokens: int = 0
    violations: dict[int, str] = field(default_factory=dict)
    """By seed."""
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def good(self) -> bool:
        return not self.violations

    def lines(self) -> list[str]:
        """For people."""
        out = [
            f"{len(self.seeds)} seeds, {self.events} events, {self.simulated_seconds:.0f} simulated seconds, "
            f"{self.tokens} tokens, {len(self.violations)} violations"
        ]
        out += [f"VIOLATION seed {seed}: {text}" for seed, text in sorted(self.violations.items())]
        out += [
            f"never reached, {kind}: {', '.join(names) if names else 'none'}"
            for kind, names in self.coverage.never(POINTS).items()
        ]
        return out


def run_seed(seed: int, events: int, settings: SimSettings) -> tuple[World, str]:
    """One world: trouble for `events` events, then calm. The text is the violation, or empty."""
    world = World(seed, settings)
    try:
        world.start()
        world.faults.start()
        world.run_events(events)
        world.settle()
    except Violation as violation:
        return world, str(violation)
    return world, ""


def run(seeds: Iterable[int], events: int = 2000, settings: SimSettings | None = None) -> Report:
    """Each seed once. Never raises a violation: it is in the report."""
    settings = settings or SimSettings()
    report = Report()
    for seed in seeds:
        world, violation = run_seed(seed, events, settings)
        report.seeds.append(seed)
        report.events += world.kernel.events
        report.simulated_seconds += world.kernel.now
        report.tokens += world.witness.tokens
        report.coverage.add(world.coverage)
        if violation:
            report.violations[seed] = violation
    return report

"""Many seeds and every scenario, one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from controlplane.sim.coverage import Coverage
from controlplane.sim.faults import POINTS
from controlplane.sim.scenarios import SCENARIOS
from controlplane.sim.settings import SimSettings
from controlplane.sim.witness import Violation
from controlplane.sim.world import World

VIOLATIONS_SHOWN = 10


@dataclass
class Report:
    """What many worlds came to."""

    worlds: int = 0
    events: int = 0
    simulated_seconds: float = 0.0
    tokens: int = 0
    violations: dict[str, Violation] = field(default_factory=dict)
    """By what is to be run again: `seed 7`, or a scenario's name and its seed."""
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def good(self) -> bool:
        return not self.violations

    def add(self, name: str, world: World, violation: Violation | None) -> None:
        self.worlds += 1
        self.events += world.kernel.events
        self.simulated_seconds += world.kernel.now
        self.tokens += world.witness.tokens
        self.coverage.add(world.coverage)
        if violation is not None:
            self.violations[name] = violation

    def lines(self) -> list[str]:
        """For people."""
        kinds = Counter(v.invariant for v in self.violations.values())
        broken = ", ".join(f"{kind} {count}×" for kind, count in sorted(kinds.items())) or "none"
        out = [
            f"{self.worlds} worlds, {self.events} events, {self.simulated_seconds:.0f} simulated seconds, "
            f"{self.tokens} tokens; violations: {broken}"
        ]
        shown = list(self.violations.items())[:VIOLATIONS_SHOWN]
        out += [f"VIOLATION {name}: {violation}" for name, violation in shown]
        out += [
            f"never reached, {kind}: {', '.join(names) if names else 'none'}"
            for kind, names in self.coverage.never(POINTS).items()
        ]
        return out


def run_seed(seed: int, events: int, settings: SimSettings) -> tuple[World, Violation | None]:
    """One world: trouble for `events` events, then calm, in which all must become well."""
    return _run(World(seed, settings), partial(_trouble_then_calm, events=events))


def _trouble_then_calm(world: World, events: int) -> None:
    world.start()
    world.troubles.start()
    world.run_events(events)
    world.settle()


def run_scenario(name: str, seed: int, settings: SimSettings) -> tuple[World, Violation | None]:
    """One of the fixed scenarios, with the engines that it wants."""
    found = SCENARIOS[name]
    return _run(World(seed, found.settings(settings)), found.run)


def _run(world: World, script: Callable[[World], None]) -> tuple[World, Violation | None]:
    """What the witness says, or an assertion of the cores themselves."""
    try:
        script(world)
    except Violation as violation:
        return world, violation
    except AssertionError as broken:
        return world, Violation("assertion", f"at {world.kernel.now:.3f} s: {broken}")
    return world, None


def run(
    seeds: Iterable[int],
    events: int = 2000,
    settings: SimSettings | None = None,
    scenarios: bool = True,
    told: Callable[[float, str], None] = lambda done, said: None,
) -> Report:
    """Each seed once, and each scenario once under the first seed. A violation is in the report, not raised.

    `told`: how many are done, and what comes."""
    settings = settings or SimSettings()
    seeds = list(seeds)
    report = Report()
    for done, seed in enumerate(seeds):
        told(float(done), f"seed {seed}")
        report.add(f"seed {seed}", *run_seed(seed, events, settings))
    for done, name in enumerate(SCENARIOS if scenarios and seeds else (), start=len(seeds)):
        told(float(done), name)
        report.add(f"{name}, seed {seeds[0]}", *run_scenario(name, seeds[0], settings))
    return report

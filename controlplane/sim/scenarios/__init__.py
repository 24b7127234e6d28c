"""Interleavings that are worth having every time, each a world of its own.

A scenario starts its world, arranges faults, runs, and checks what must have come of them; the witness checks all the
rest. It raises `Violation`. To add one: write a function of a world in one of these modules, and `scenario` lists it.
"""

from controlplane.sim.scenarios import (
    catch_up,
    deaths,
    disturbances,
    drains,
    installs,
    keeps,
    lending,
    lies,
    links,
    models,
    pauses,
    restarts,
    sleep,
    streaming,
    terms,
)
from controlplane.sim.scenarios.stage import SCENARIOS, Scenario

__all__ = [
    "SCENARIOS",
    "Scenario",
    "catch_up",
    "deaths",
    "disturbances",
    "drains",
    "installs",
    "keeps",
    "lending",
    "lies",
    "links",
    "models",
    "pauses",
    "restarts",
    "sleep",
    "streaming",
    "terms",
]

"""What a run reached, and what it never did."""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.core import engine_events, fleet_events

ENGINE_EVENTS = frozenset(t.__name__ for t in typing.get_args(engine_events.Event))
FLEET_EVENTS = frozenset(t.__name__ for t in typing.get_args(fleet_events.Event))

PHASES = frozenset(
    {
        ("preparing", "go"),
        ("preparing", "failed"),
        ("go", "committed"),
        ("go", "degraded"),
        ("go", "failed"),
    }
)
"""Every step of an update."""

WORDS = frozenset(
    {
        ("starting", "empty"),
        ("empty", "receiving"),
        ("empty", "held"),
        ("receiving", "empty"),
        ("receiving", "installing"),
        ("receiving", "held"),
        ("installing", "ready"),
        ("installing", "serving"),
        ("installing", "poisoned"),
        ("installing", "held"),
        ("ready", "serving"),
        ("ready", "installing"),
        ("ready", "held"),
        ("ready", "poisoned"),
        ("serving", "ready"),
        ("serving", "installing"),
        ("serving", "held"),
        ("serving", "poisoned"),
        ("held", "empty"),
        ("held", "receiving"),
        ("held", "ready"),
        ("held", "serving"),
        ("held", "installing"),
        ("held", "poisoned"),
        ("poisoned", "installing"),
        ("empty", "dead"),
        ("receiving", "dead"),
        ("installing", "dead"),
        ("ready", "dead"),
        ("serving", "dead"),
        ("held", "dead"),
        ("poisoned", "dead"),
    }
)
"""The steps of an engine's word that faults, pushes and operators bring about."""

REASONS = frozenset(
    {
        "BYTE_COUNT_MISMATCH",
        "CANARY_FAILED",
        "CHECKSUM_MISMATCH",
        "COORDINATOR_RECOVERING",
        "DEADLINE_EXCEEDED",
        "DTYPE_MISMATCH",
        "ENGINE_DIED",
        "ENGINE_MISFIT",
        "ENGINE_NOT_READY",
        "ENGINE_POISONED",
        "FORMAT_MISMATCH",
        "FRAME_OUT_OF_ORDER",
        "INSTALL_FAILED",
        "INSTALL_TIMED_OUT",
        "INVALID_MESSAGE",
        "LAYOUT_UNKNOWN",
        "LEASE_HELD",
        "MANIFEST_INCOMPLETE",
        "NOT_WELCOMED",
        "NO_ENGINES",
        "PEER_LOST",
        "SHAPE_MISMATCH",
        "STALE_TERM",
        "STALE_VERSION",
        "UNKNOWN_TENSOR",
        "UNKNOWN_UPDATE",
        "UPDATE_ABORTED",
        "UPDATE_IN_PROGRESS",
        "VERSION_CONFLICT",
        "VERSION_UNAVAILABLE",
        "WRONG_INCARNATION",
        "WRONG_MODEL",
        "WRONG_RUN",
    }
)
"""What the pure cores, or an agent on their word, refuse or fail with."""


@dataclass
class Coverage:
    """Counts of what was reached."""

    engine_events: Counter[str] = field(default_factory=Counter)
    fleet_events: Counter[str] = field(default_factory=Counter)
    words: Counter[tuple[str, str]] = field(default_factory=Counter)
    phases: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)

    def add(self, other: Coverage) -> None:
        self.engine_events += other.engine_events
        self.fleet_events += other.fleet_events
        self.words += other.words
        self.phases += other.phases
        self.reasons += other.reasons
        self.points += other.points

    def never(self, points: Iterable[str]) -> dict[str, list[str]]:
        """What was not reached, by kind, in words."""
        return {
            "engine events": sorted(ENGINE_EVENTS - self.engine_events.keys()),
            "coordinator events": sorted(FLEET_EVENTS - self.fleet_events.keys()),
            "engine words": _arrows(WORDS - self.words.keys()),
            "update phases": _arrows(PHASES - self.phases.keys()),
            "error reasons": sorted(REASONS - self.reasons.keys()),
            "fault points": sorted(set(points) - self.points.keys()),
        }


def _arrows(steps: Iterable[tuple[str, str]]) -> list[str]:
    return sorted(f"{a} → {b}" for a, b in steps)

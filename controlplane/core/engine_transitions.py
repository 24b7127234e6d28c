"""How each part of an engine's state may move, and by which event: one table.

`EngineCore` checks every step against it, the simulator reports which rows it never reached, and the diagrams in
docs/protocol.md are drawn from it. To let the state move in a new way, add a row here; a move that has none ends the
engine's life rather than be believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from controlplane.core import engine_events as ev
from controlplane.core.engine_state import Activity, EngineState, Held, Life, Residency, WeightsKind


class Part(Enum):
    """The parts of the product. Holds come and go freely: each has its owner."""

    LIFE = "life"
    WEIGHTS = "weights"
    ACTIVITY = "activity"
    RESIDENCY = "residency"


Value = Life | WeightsKind | Activity | Residency


@dataclass(frozen=True, slots=True)
class Move:
    """One step of one part."""

    part: Part
    before: Value
    event: str
    after: Value

    def __str__(self) -> str:
        return f"{self.part.value}: {self.before.value} → {self.after.value} by {self.event}"


def _rows(part: Part, event: type[ev.Event], after: Value, *before: Value) -> list[Move]:
    return [Move(part, b, event.__name__, after) for b in before]


_LIFE = [
    *_rows(Part.LIFE, ev.Started, Life.RUNNING, Life.STARTING),
    *_rows(Part.LIFE, ev.Stopping, Life.STOPPING, Life.RUNNING),
    *_rows(Part.LIFE, ev.Died, Life.DEAD, Life.STARTING, Life.RUNNING, Life.STOPPING),
]
_WEIGHTS = [
    # INV-1: unset before the first byte; set in the step that finished.
    *_rows(Part.WEIGHTS, ev.Quiesced, WeightsKind.UNSET, WeightsKind.HELD, WeightsKind.POISONED),
    *_rows(Part.WEIGHTS, ev.CanaryPassed, WeightsKind.HELD, WeightsKind.UNSET),
    # Spans disagreed in mid-install: what a full update brought is whole all the same.
    *_rows(Part.WEIGHTS, ev.CanaryPassed, WeightsKind.HELD, WeightsKind.POISONED),
    # Asleep but for the weights' memory: claimed, and held UNPROVEN until the canary spoke.
    *_rows(Part.WEIGHTS, ev.CanaryDeferred, WeightsKind.HELD, WeightsKind.UNSET, WeightsKind.POISONED),
    *_rows(Part.WEIGHTS, ev.Disproven, WeightsKind.POISONED, WeightsKind.HELD),
    # INV-4: untouched gives back what was held before; touched is poison.
    *_rows(Part.WEIGHTS, ev.InstallEnded, WeightsKind.HELD, WeightsKind.UNSET),
    *_rows(Part.WEIGHTS, ev.InstallEnded, WeightsKind.POISONED, WeightsKind.UNSET, WeightsKind.HELD),
    *_rows(Part.WEIGHTS, ev.SpansDisagreed, WeightsKind.POISONED, WeightsKind.UNSET, WeightsKind.HELD),
    *_rows(Part.WEIGHTS, ev.Doubted, WeightsKind.POISONED, WeightsKind.HELD),
    *_rows(Part.WEIGHTS, ev.SleepRequested, WeightsKind.UNSET, WeightsKind.HELD, WeightsKind.POISONED),
    *_rows(Part.WEIGHTS, ev.Died, WeightsKind.UNSET, WeightsKind.HELD, WeightsKind.POISONED),
    # A frozen model's engine holds what it loaded.
    *_rows(Part.WEIGHTS, ev.Started, WeightsKind.HELD, WeightsKind.UNSET),
]
_BEFORE_COMMIT = (Activity.RECEIVING, Activity.READY)
_ACTIVITY = [
    *_rows(Part.ACTIVITY, ev.Opened, Activity.RECEIVING, Activity.IDLE, Activity.READY),
    *_rows(Part.ACTIVITY, ev.BytesVerified, Activity.READY, Activity.RECEIVING),
    *_rows(Part.ACTIVITY, ev.CommitArrived, Activity.INSTALLING, Activity.READY),  # INV-3
    *_rows(Part.ACTIVITY, ev.StreamAdmitted, Activity.READY, Activity.RECEIVING),
    *_rows(Part.ACTIVITY, ev.ChunkArrived, Activity.INSTALLING, Activity.READY),  # streaming: a chunk is its start
    *_rows(Part.ACTIVITY, ev.CanaryPassed, Activity.IDLE, Activity.INSTALLING),
    *_rows(Part.ACTIVITY, ev.CanaryDeferred, Activity.IDLE, Activity.INSTALLING),
    *_rows(Part.ACTIVITY, ev.InstallEnded, Activity.IDLE, Activity.INSTALLING),
    *_rows(Part.ACTIVITY, ev.StreamEnded, Activity.IDLE, *_BEFORE_COMMIT),
    *_rows(Part.ACTIVITY, ev.FleetChanged, Activity.IDLE, *_BEFORE_COMMIT),  # INV-7
    *_rows(Part.ACTIVITY, ev.SleepRequested, Activity.IDLE, *_BEFORE_COMMIT),
    *_rows(Part.ACTIVITY, ev.HoldChanged, Activity.IDLE, *_BEFORE_COMMIT),  # it drains
    *_rows(Part.ACTIVITY, ev.Died, Activity.IDLE, *_BEFORE_COMMIT, Activity.INSTALLING),
]
_RESIDENCY = [
    *_rows(Part.RESIDENCY, ev.SleepRequested, Residency.ASLEEP, Residency.AWAKE, Residency.WEIGHTS),
    *_rows(Part.RESIDENCY, ev.Woke, Residency.WEIGHTS, Residency.ASLEEP),
    *_rows(Part.RESIDENCY, ev.Woke, Residency.AWAKE, Residency.ASLEEP, Residency.WEIGHTS),
]
TABLE = frozenset([*_LIFE, *_WEIGHTS, *_ACTIVITY, *_RESIDENCY])


def moves(event: type[ev.Event], before: EngineState, after: EngineState) -> list[Move]:
    """What an event moved."""
    pairs: list[tuple[Part, Value, Value]] = [
        (Part.LIFE, before.life, after.life),
        (Part.WEIGHTS, before.weights_kind, after.weights_kind),
        (Part.ACTIVITY, before.activity, after.activity),
        (Part.RESIDENCY, before.residency, after.residency),
    ]
    return [Move(part, a, event.__name__, b) for part, a, b in pairs if a is not b]


def check(event: type[ev.Event], before: EngineState, after: EngineState) -> None:
    """Raises AssertionError for a move that the table does not have, or held weights that became others (INV-2)."""
    if before is after:
        return
    strange = [m for m in moves(event, before, after) if m not in TABLE]
    if strange:
        raise AssertionError(f"no row of the table: {', '.join(map(str, strange))}")
    if isinstance(before.weights, Held) and isinstance(after.weights, Held) and before.weights != after.weights:
        raise AssertionError(f"{event.__name__} made {before.weights} {after.weights} in one step")


def diagram(part: Part, table: Iterable[Move] = TABLE) -> str:
    """A mermaid state diagram of one part."""
    edges: dict[tuple[str, str], set[str]] = {}
    for move in table:
        if move.part is part:
            edges.setdefault((move.before.value, move.after.value), set()).add(move.event)
    lines = [f"    {a} --> {b}: {', '.join(sorted(events))}" for (a, b), events in sorted(edges.items())]
    return "\n".join(["stateDiagram-v2", *lines])

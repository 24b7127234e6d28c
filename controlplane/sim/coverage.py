"""What a run reached, and what it never did: measured with the tables of the cores themselves."""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.core import engine_events, errors, fleet_events
from controlplane.core.engine_state import HoldKind
from controlplane.core.engine_transitions import TABLE, Move
from controlplane.core.plan import HOST_MEMORY, Transport
from controlplane.core.update_transaction import PHASE_MOVES, Phase

ENGINE_EVENTS = frozenset(t.__name__ for t in typing.get_args(engine_events.Event))
FLEET_EVENTS = frozenset(t.__name__ for t in typing.get_args(fleet_events.Event))

TRANSPORTS = HOST_MEMORY | {Transport.BROADCAST}
"""Of every engine and trainer here. What differs between them is which is planned; bytes come all the same."""
NOT_HERE = {
    "INCOMPATIBLE_NODE": "said of protocol versions and settings, at the wire",
    "LIMIT_EXCEEDED": "said of queues, messages and memory, which are not modelled",
    "SEGMENT_UNREADABLE": "said of shared memory, which is not modelled: bytes are numbers here",
    "SLOT_MISMATCH": "said by ranks of each other; a simulated trainer is one process",
    "DEVICE_HANDLES_MISSING": "said of device handles, which are not modelled",
    "LINK_FAILED": "said by the two ends of a link's process group; what plans avoid after it is modelled",
    "IPC_NOT_POSSIBLE": "said of device memory, which is not modelled",
    "REQUEST_ABORTED": "said of scores, which are not modelled",
    "SCORE_INCOMPLETE": "said of scores, which are not modelled",
    **dict.fromkeys(
        ("UNAUTHENTICATED", "PERMISSION_DENIED", "IDENTITY_MISMATCH", "TLS_FAILED"),
        "said at ports, of certificates and tokens, which are not modelled",
    ),
    "RATE_LIMITED": "said at ports, of how often one caller calls, which is not modelled",
    "CHECK_FAILED": "raised at the caller of `push(check=True)`, which asks engines by itself",
    "UPDATE_FAILED": "raised at the caller of `push()`, from a decision that is counted as a phase",
}
"""Reasons that the cores and the agents' streams cannot give in a world without processes, files and parameters."""
REASONS = frozenset(c.reason for c in errors.error_classes() if c.__module__ == errors.__name__) - NOT_HERE.keys()


@dataclass
class Coverage:
    """Counts of what was reached."""

    engine_events: Counter[str] = field(default_factory=Counter)
    fleet_events: Counter[str] = field(default_factory=Counter)
    moves: Counter[Move] = field(default_factory=Counter)
    phases: Counter[tuple[Phase, Phase]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    holds: Counter[HoldKind] = field(default_factory=Counter)
    ways: Counter[Transport] = field(default_factory=Counter)
    """What plans took, for one engine each."""

    def add(self, other: Coverage) -> None:
        self.engine_events += other.engine_events
        self.fleet_events += other.fleet_events
        self.moves += other.moves
        self.phases += other.phases
        self.reasons += other.reasons
        self.points += other.points
        self.holds += other.holds
        self.ways += other.ways

    def never(self, points: Iterable[str]) -> dict[str, list[str]]:
        """What was not reached, by kind, in words."""
        return {
            "engine events": sorted(ENGINE_EVENTS - self.engine_events.keys()),
            "coordinator events": sorted(FLEET_EVENTS - self.fleet_events.keys()),
            "engine transitions": sorted(map(str, TABLE - self.moves.keys())),
            "update phases": sorted(f"{a.value} → {b.value}" for a, b in PHASE_MOVES - self.phases.keys()),
            "error reasons": sorted(REASONS - self.reasons.keys()),
            "holds": sorted(k.value for k in set(HoldKind) - self.holds.keys()),
            "transports": sorted(t.value for t in TRANSPORTS - self.ways.keys()),
            "fault points": sorted(set(points) - self.points.keys()),
        }

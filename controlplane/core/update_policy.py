"""What an update needs of the fleet, and when the fleet begins to serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Mode(Enum):
    """When the fleet begins to serve a new version."""

    BARRIER = "barrier"
    """At the decision, all at once."""
    ROLLING = "rolling"
    """With the first engine that applied; until all are decided both versions are served."""


@dataclass(frozen=True, slots=True)
class UpdatePolicy:
    """What an update needs to go and to commit."""

    mode: Mode = Mode.BARRIER
    quorum: int | None = None
    """How many of the required units must be ready, and then apply; None: all of them."""
    min_engines: Mapping[str, int] = field(default_factory=dict)
    """By group: how many of its engines must be ready, and then apply, whatever the quorum says."""

    def needed(self, required: int) -> int:
        return required if self.quorum is None else min(self.quorum, required)

"""The update that an engine is in the middle of: what was opened, what came of it, and what was held before.

It is the core's to change; whoever carries out its install reads it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from controlplane.core.assembly import Assembly
from controlplane.core.canary import CanaryReference
from controlplane.core.engine_state import Hold, KeptBase, Unset, Weights
from controlplane.core.pauses import PausePolicy
from controlplane.core.versions import Term, UpdateId, WeightVersion


@dataclass
class Update:
    """One attempt under way."""

    stream: int
    update_id: UpdateId
    version: WeightVersion
    writer_term: Term
    byte_count: int
    layout_digest: bytes
    by_coordinator: bool = False
    base: KeptBase | None = None
    """Of a delta: what it changes."""
    assembly: Assembly | None = None
    verified: bool = False
    content_digest: bytes = b""
    reference: CanaryReference | None = None
    """What the canary must say too."""
    pause: PausePolicy | None = None
    held_before: Weights = field(default_factory=Unset)
    unproven_before: Set[Hold] = frozenset()
    quiesced: bool = False
    """The next step touches weights: from here on a failure is poison unless the engine is certain (INV-4)."""
    streaming: bool = False
    committed: bool = False
    """The commit frame was taken: from here on the agent owns the install (INV-6)."""
    cut: bool = False
    """Of a streaming update: its stream ended in mid-install, and nothing more is taken."""

    @property
    def in_stream(self) -> bool:
        """Its stream still decides about it: what ends the stream ends the update."""
        return not self.committed and not self.cut

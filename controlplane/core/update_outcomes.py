"""What became of an update on each engine, how many of each there are, and when it moved."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.core.canary import Verification
from controlplane.core.engine_state import Stage, Timings
from controlplane.core.versions import EngineId, Incarnation


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the update on one engine, by its own report."""

    engine_id: EngineId
    incarnation: Incarnation
    required: bool
    stage: Stage | None = None
    """None: it has not reported this update."""
    lost: bool = False
    error_reason: str = ""
    error_message: str = ""
    group: str = ""
    """What `min_engines` counts it under."""
    unit: str = ""
    """Engines of one unit (prefill and decode) count together or not at all. Empty: it is alone."""
    awaited: bool = False
    """Not required, but it missed too many updates: go waits for it, within the limit."""
    content_digest: bytes = b""
    """What it holds of this version, once applied."""
    changed_tensors: int | None = None
    """Once applied: how many differ from what it held last; None: at its first, or not known."""
    tensor_count: int = 0
    verification: Verification = Verification.UNVERIFIED
    """Once applied: by what it was found to be right, as far as was known then."""

    @property
    def ended(self) -> bool:
        return self.lost or (self.stage is not None and self.stage.final)

    @property
    def applied(self) -> bool:
        """It applied, and that life still stands (INV-9: incarnations alive at the decision)."""
        return self.stage is Stage.APPLIED and not self.lost

    @property
    def ready(self) -> bool:
        return not self.lost and self.stage in (Stage.READY, Stage.INSTALLING, Stage.APPLIED)

    @property
    def bad(self) -> bool:
        return self.ended and not self.applied

    def __str__(self) -> str:
        said = "lost" if self.lost else self.stage.value if self.stage else "silent"
        return f"{self.engine_id} {said}" + (f" ({self.error_reason}: {self.error_message})" if self.bad else "")


@dataclass
class Tally:
    """Counts of outcomes, so that a report which decides nothing costs no look at all the others."""

    late: int = 0
    """Waited for before go: neither ready nor bad."""
    open: int = 0
    """Required, and not ended."""
    bad: int = 0
    """Required, and bad."""

    def count(self, outcome: Outcome, by: int) -> None:
        if outcome.required or outcome.awaited:
            self.late += by * (not outcome.ready and not outcome.bad)
        if outcome.required:
            self.open += by * (not outcome.ended)
            self.bad += by * outcome.bad


@dataclass(slots=True)
class Times:
    """When an update moved, in monotonic seconds of this coordinator's life. For people: nothing is decided by it."""

    began: float | None = None
    """None: before this life."""
    went_go: float | None = None
    decided: float | None = None
    stages: dict[EngineId, dict[Stage, float]] = field(default_factory=dict)
    """When each engine's report of each stage came, in order."""
    installs: dict[EngineId, Timings] = field(default_factory=dict)
    """How long its install took, by the engine's own report."""

"""What an engine is: the product life × weights × activity × residency × holds, and what follows from it.

One piece of code for the agent (which owns the state) and the coordinator (which keeps what was reported).
Whether the gate is open and which word people see are derived, never stored. How each part may move is
`engine_transitions`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from controlplane.core.canary import Canary
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, UpdateId, WeightVersion


class Life(Enum):
    """Whether the engine's processes run."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Unset:
    """No version: nothing was applied in this incarnation, or an install is under way (INV-1)."""


@dataclass(frozen=True, slots=True)
class Held:
    """Exactly this version; the digest names its bytes."""

    version: WeightVersion
    content_digest: bytes


@dataclass(frozen=True, slots=True)
class KeptBase:
    """The bytes of a version that an engine agent still has, by account: what a delta can be applied to (INV-5)."""

    weights: Held
    layout_digest: bytes
    checksums: tuple[bytes, ...]
    """Of its tensors, in layout order."""


@dataclass(frozen=True, slots=True)
class Poisoned:
    """A mixture (INV-4). Only a full update or a new incarnation heals it."""

    cause: str


Weights = Unset | Held | Poisoned


class WeightsKind(Enum):
    """What an engine's weights are, without which."""

    UNSET = "unset"
    HELD = "held"
    POISONED = "poisoned"


class Residency(Enum):
    """What lies in device memory. An install needs the weights' memory; the canary (put off until then) and tokens
    need both."""

    AWAKE = "awake"
    """Weights and KV cache."""
    WEIGHTS = "weights"
    """Weights, without a KV cache."""
    ASLEEP = "asleep"
    """Neither: the devices are somebody else's."""


class HoldKind(Enum):
    OPERATOR = "operator"
    UPDATING = "updating"
    ASLEEP = "asleep"
    DRAINING = "draining"
    POISONED = "poisoned"
    FINISHING = "finishing"
    UNPROVEN = "unproven"
    """A version was installed without a KV cache; its canary speaks when there is one."""
    STALLED = "stalled"


LETS_FINISH = frozenset({HoldKind.DRAINING, HoldKind.FINISHING, HoldKind.STALLED})
"""While only these shut a gate, nobody enters, and who is in goes on to the end."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A named reason to keep the gate shut. Only its owner's word ends it."""

    kind: HoldKind
    owner: str

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.owner})"


class Stage(Enum):
    """How far an update came on an engine; the last three are final."""

    RECEIVING = "receiving"
    READY = "ready"
    INSTALLING = "installing"
    APPLIED = "applied"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in (Stage.APPLIED, Stage.ABORTED, Stage.FAILED)


class Activity(Enum):
    """What an engine does with an update now."""

    IDLE = "idle"
    RECEIVING = "receiving"
    READY = "ready"
    INSTALLING = "installing"


_ACTIVITIES = {
    Stage.RECEIVING: Activity.RECEIVING,
    Stage.READY: Activity.READY,
    Stage.INSTALLING: Activity.INSTALLING,
}


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of an install, by part."""

    quiesce: float = 0.0
    install: float = 0.0
    caches: float = 0.0
    canary: float = 0.0
    wait: float = 0.0
    """Before all that: until the requests in the engine had ended, where they were waited for."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The latest update that this incarnation saw."""

    update_id: UpdateId
    version: WeightVersion
    stage: Stage
    bytes_received: int = 0
    error_reason: str = ""
    error_message: str = ""
    timings: Timings | None = None
    changed_tensors: int | None = None
    """Once applied: tensors whose bytes differ from what this engine held last; None at its first."""
    tensor_count: int = 0
    """Once applied: tensors of the version."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A version that an engine would not take, or could not: the latest of this incarnation."""

    version: WeightVersion
    reason: str
    message: str
    at: float
    """Monotonic seconds of whoever keeps it."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """The whole state of one engine in one incarnation."""

    run_id: RunId
    model: ModelName
    engine_id: EngineId
    incarnation: Incarnation
    life: Life = Life.STARTING
    weights: Weights = field(default_factory=Unset)
    residency: Residency = Residency.AWAKE
    holds: frozenset[Hold] = frozenset()
    progress: Progress | None = None
    canary: Canary | None = None
    """What it said of the version that it holds; None where it holds none, or loaded it itself."""
    frozen: bool = False
    """It serves the checkpoint that it loaded, as number 0, and takes no update (`initial = serve`)."""
    live_requests: int = 0
    waiting_requests: int = 0
    tokens_by_lag: tuple[int, ...] = ()
    """Tokens that this life made, by their version's lag in fleet commits; the last entry stands for more too."""

    @property
    def applied(self) -> WeightVersion | None:
        """The version that the engine holds; None is unset, and equal to no version."""
        return self.weights.version if isinstance(self.weights, Held) else None

    @property
    def weights_kind(self) -> WeightsKind:
        match self.weights:
            case Held():
                return WeightsKind.HELD
            case Poisoned():
                return WeightsKind.POISONED
            case _:
                return WeightsKind.UNSET

    @property
    def activity(self) -> Activity:
        return Activity.IDLE if self.progress is None else _ACTIVITIES.get(self.progress.stage, Activity.IDLE)

    @property
    def installing(self) -> bool:
        return self.activity is Activity.INSTALLING

    def held_by(self, kind: HoldKind) -> str | None:
        """Owner of a hold of that kind, the first by name; None if there is none."""
        return min((h.owner for h in self.holds if h.kind is kind), default=None)

    def gate_open(self, served: frozenset[WeightVersion]) -> bool:
        """Tokens may leave: the engine runs, holds a version that the fleet serves, and nobody holds the gate."""
        return (
            self.life is Life.RUNNING
            and isinstance(self.weights, Held)
            and self.weights.version in served
            and self.residency is Residency.AWAKE
            and not self.holds
        )

    def word(self, served: frozenset[WeightVersion]) -> str:
        """The one word shown to people."""
        if self.life is not Life.RUNNING:
            return str(self.life.value)
        if self.installing:
            return "installing"
        if isinstance(self.weights, Poisoned):
            return "poisoned"
        if self.residency is not Residency.AWAKE:
            return "asleep"
        if self.held_by(HoldKind.DRAINING) is not None:
            return "draining"
        if self.held_by(HoldKind.STALLED) is not None:
            return "stalled"
        if self.holds:
            return "held"
        if self.gate_open(served):
            return "serving"
        if isinstance(self.weights, Unset):
            return "empty" if self.activity is Activity.IDLE else "receiving"
        return "ready"

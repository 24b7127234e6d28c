"""What the coordinator knows, and what must survive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controlplane.core.conditions import Condition
from controlplane.core.engine_state import EngineState, HoldKind, Life, Refusal, Residency
from controlplane.core.lag import Commits
from controlplane.core.plan import HOST_MEMORY, EnginePlace, Load, RankPlace, Transport
from controlplane.core.planner import Way
from controlplane.core.update_outcomes import Outcome
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import (
    FROZEN,
    NO_TERM,
    EngineId,
    Incarnation,
    ModelName,
    Term,
    TrainerId,
    UpdateId,
    WeightVersion,
)

# ---- in memory ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judged:
    """What the conditions of an engine are made of."""

    state: EngineState
    served: tuple[WeightVersion, ...]
    """What it may serve."""
    known: bool
    routable: bool


@dataclass
class EngineRecord:
    """An engine as it last said (INV-8). `session` is None when it is silent: UNKNOWN."""

    place: EnginePlace
    state: EngineState
    session: int | None
    reported_at: float
    capabilities: tuple[str, ...] = ()
    gate_open: bool = False
    refused: Refusal | None = None
    """The latest version that this life would not take, or could not."""
    missed: int = 0
    """Decisions in a row that it was alive for, and which its own update came too late for."""
    judged: Judged | None = None
    """As of the latest `date_conditions`."""
    conditions: tuple[Condition, ...] = ()

    @property
    def live(self) -> bool:
        """Heard, and its engine runs."""
        return self.session is not None and self.state.life is Life.RUNNING

    @property
    def able(self) -> bool:
        """It could take an update now: live, awake, and not about to leave."""
        return self._stays and self.state.residency is Residency.AWAKE

    @property
    def _stays(self) -> bool:
        return self.live and self.state.held_by(HoldKind.DRAINING) is None

    def asleep_for(self, owner: str) -> bool:
        """It would be able, and sleeps for that one only: whoever it is wakes its weights' memory before an update."""
        sleepers = {h.owner for h in self.state.holds if h.kind is HoldKind.ASLEEP}
        return self._stays and sleepers == {owner}


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that ended without leaving."""

    rank: int
    cause: str


@dataclass
class TrainerRecord:
    """The holder of a model's lease."""

    trainer_id: TrainerId
    incarnation: Incarnation
    model: ModelName
    term: Term
    ranks: tuple[RankPlace, ...]
    session: int | None
    expires_at: float
    progress: int = 0
    progressed_at: float = 0.0
    step: int | None = None
    phase: str = ""
    holds_devices: bool = False
    """Engines on its devices are asleep for it: nobody else wakes, heals or restarts them."""
    devices_unknown: bool = False
    """Nothing was heard of it since the coordinator's restart, or since its lease began: it may hold devices."""
    lost: tuple[LostRank, ...] = ()
    """Of this life; with any it pushes no more. Shown to people: what becomes of its update is the agent's to say."""
    transports: frozenset[Transport] = HOST_MEMORY
    """How its ranks can send."""
    load: Load | None = None
    """What it sends; None: it did not say."""
    software: tuple[str, ...] = ()
    """What its ranks run on, for people."""
    left: bool = False
    """It said goodbye: it is not missed. Not known any more after a coordinator's restart."""
    avoid: Mapping[Way, str] = field(default_factory=dict)
    """What its last request for an update said does not work, with the cause; for dry runs."""


@dataclass
class ModelRecord:
    """A model of the run."""

    term: Term = NO_TERM
    served: tuple[WeightVersion, ...] = ()
    ordinal: int = 0
    digests: dict[WeightVersion, bytes] = field(default_factory=dict)
    """Content digest of each served version, where an engine's report told it."""
    checkpoints: dict[int, CheckpointKept] = field(default_factory=dict)
    """By number: what a coordinator can bring by itself."""
    commits: Commits = field(default_factory=Commits)
    """The latest; what lag is counted in."""

    @property
    def frozen(self) -> bool:
        return FROZEN in self.served


# ---- on disk ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TermGiven:
    """A trainer's lease: its term, and who holds it."""

    model: ModelName
    term: Term
    trainer_id: TrainerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class EngineKnown:
    engine_id: EngineId
    model: ModelName


@dataclass(frozen=True, slots=True)
class EngineForgotten:
    """It said goodbye; a restart need not wait for it."""

    engine_id: EngineId


class EngineAsked(NamedTuple):
    """An engine that an update was planned for; see Outcome."""

    engine_id: EngineId
    incarnation: Incarnation
    required: bool
    group: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class UpdateBegan:
    """Uses the number up, and answers the request from now on."""

    update_id: UpdateId
    request_id: str
    model: ModelName
    version: WeightVersion
    step: int | None
    engines: tuple[EngineAsked, ...]
    layout_digest: bytes = b""
    """sha256 of the layout; empty where the writer did not say."""
    byte_count: int = 0
    restores: WeightVersion | None = None
    """Of a rollback: the version whose weights it brings back."""


@dataclass(frozen=True, slots=True)
class UpdateWentGo:
    update_id: UpdateId


@dataclass(frozen=True, slots=True)
class UpdateRolled:
    """A rolling update's first engine applied: its version is served too, and `ordinal` is the model's from now on."""

    update_id: UpdateId
    model: ModelName
    served: tuple[WeightVersion, ...]
    ordinal: int
    content_digest: bytes = b""
    """Of the update's version, as its first engine reported it."""


@dataclass(frozen=True, slots=True)
class UpdateDecided:
    """With a commit, `served` and `ordinal` are the model's from now on."""

    update_id: UpdateId
    model: ModelName
    phase: Phase
    cause: str
    served: tuple[WeightVersion, ...]
    ordinal: int
    content_digest: bytes = b""
    """Of the update's version, as engines reported it; empty if none applied it."""
    outcomes: tuple[Outcome, ...] = ()
    """What each engine reported until then (INV-9)."""


@dataclass(frozen=True, slots=True)
class FrozenServed:
    """A model without a trainer: its engines serve the checkpoint that they loaded, as number 0."""

    model: ModelName
    content_digest: bytes


@dataclass(frozen=True, slots=True)
class CheckpointKept:
    """A committed version lies in a directory that engines can read. `name` is relative to their checkpoint root."""

    model: ModelName
    version: WeightVersion
    name: str
    layout_digest: bytes
    content_digest: bytes
    tensor_count: int
    file_count: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class CheckpointGone:
    """It is, or will be, deleted."""

    model: ModelName
    number: int


@dataclass(frozen=True, slots=True)
class EngineKept:
    """An engine stays at this version while the fleet moves on; over its restarts too, until it is released."""

    engine_id: EngineId
    model: ModelName
    version: WeightVersion
    content_digest: bytes = b""
    """What the version is, as far as it is known."""


@dataclass(frozen=True, slots=True)
class EngineReleased:
    """It goes with the fleet again."""

    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class FloorRaised:
    """A person accepted an older copy of the ledger: nothing up to these is ever given again."""

    number: int
    coordinator_term: Term
    """This coordinator's term from now on."""
    terms: tuple[tuple[ModelName, Term], ...]
    accepted_by: str


Record = (
    TermGiven
    | EngineKnown
    | EngineForgotten
    | UpdateBegan
    | UpdateWentGo
    | UpdateRolled
    | UpdateDecided
    | FrozenServed
    | CheckpointKept
    | CheckpointGone
    | EngineKept
    | EngineReleased
    | FloorRaised
)


@dataclass(frozen=True, slots=True)
class RequestKnown:
    """A request for an update that was answered: repeated, it gets the same answer and no second number."""

    request_id: str
    update_id: UpdateId
    model: ModelName
    version: WeightVersion
    layout_digest: bytes
    age_seconds: float


REQUEST_ID_SECONDS = 24 * 3600.0
"""How long an answered request is remembered, over restarts too."""


@dataclass(frozen=True)
class Recovered:
    """What a ledger held when it was opened. `coordinator_term` is already the new one."""

    coordinator_term: Term
    next_number: int = 1
    models: dict[ModelName, ModelRecord] = field(default_factory=dict)
    leases: Sequence[TermGiven] = ()
    """The latest of each model."""
    engines: Sequence[EngineKnown] = ()
    open_updates: Sequence[tuple[UpdateBegan, bool]] = ()
    """Updates without a decision; the flag says whether go was written."""
    rolled: frozenset[UpdateId] = frozenset()
    """Those of them whose version is served already."""
    requests: Sequence[RequestKnown] = ()
    """Those younger than REQUEST_ID_SECONDS."""
    kept: Sequence[EngineKept] = ()
    """Engines that stay at a version, by name."""

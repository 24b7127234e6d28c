"""What the coordinator knows, and what must survive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from controlplane.core.engine_state import EngineState
from controlplane.core.plan import EnginePlace, RankPlace
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import (
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


@dataclass
class EngineRecord:
    """An engine as it last said (INV-8). `session` is None when it is silent: UNKNOWN."""

    place: EnginePlace
    state: EngineState
    session: int | None
    reported_at: float
    capabilities: tuple[str, ...] = ()
    gate_open: bool = False


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


@dataclass
class ModelRecord:
    """A model of the run."""

    term: Term = NO_TERM
    served: tuple[WeightVersion, ...] = ()
    ordinal: int = 0


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


@dataclass(frozen=True, slots=True)
class UpdateBegan:
    """Uses the number up."""

    update_id: UpdateId
    request_id: str
    model: ModelName
    version: WeightVersion
    step: int | None
    engines: tuple[tuple[EngineId, Incarnation, bool], ...]
    """Engine, its incarnation, whether it is required."""


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


@dataclass(frozen=True, slots=True)
class UpdateDecided:
    """With a commit, `served` and `ordinal` are the model's from now on."""

    update_id: UpdateId
    model: ModelName
    phase: Phase
    cause: str
    served: tuple[WeightVersion, ...]
    ordinal: int


Record = TermGiven | EngineKnown | EngineForgotten | UpdateBegan | UpdateWentGo | UpdateRolled | UpdateDecided


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

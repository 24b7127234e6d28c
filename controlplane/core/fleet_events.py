"""What happens to a coordinator, and what its core answers: the events and effects of `FleetCore`."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core import errors as e
from controlplane.core.engine_state import EngineState
from controlplane.core.fleet_records import Record
from controlplane.core.plan import EnginePlace, RankPlace
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import Incarnation, ModelName, RunId, Term, TrainerId, UpdateId

# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineConnected:
    session: int
    place: EnginePlace
    state: EngineState
    gate_open: bool
    capabilities: tuple[str, ...]
    max_term: Term
    max_coordinator_term: Term
    max_number: int = 0
    """Highest number that it applied in any life."""


@dataclass(frozen=True, slots=True)
class EngineReported:
    session: int
    state: EngineState
    gate_open: bool


@dataclass(frozen=True, slots=True)
class TrainerConnected:
    session: int
    run_id: RunId
    model: ModelName
    trainer_id: TrainerId
    incarnation: Incarnation
    ranks: tuple[RankPlace, ...]
    held_term: Term
    ended_incarnation: str
    takeover: bool


@dataclass(frozen=True, slots=True)
class TrainerReported:
    session: int
    term: Term
    step: int | None
    phase: str
    progress: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """`goodbye`: the agent said so. Else it is silence."""

    session: int
    goodbye: bool


@dataclass(frozen=True, slots=True)
class UpdateRequested:
    update_id: UpdateId
    """Made by the caller for this event; not used if the request is a repeat."""
    request_id: str
    run_id: RunId
    model: ModelName
    term: Term
    step: int | None
    ready_limit_seconds: float | None


@dataclass(frozen=True, slots=True)
class AbortRequested:
    run_id: RunId
    update_id: UpdateId
    term: Term
    reason: str


@dataclass(frozen=True, slots=True)
class Paused:
    """The coordinator itself stood still for so long (stopped, swapped out): nobody's silence in it means anything."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by."""


Event = (
    EngineConnected
    | EngineReported
    | TrainerConnected
    | TrainerReported
    | SessionEnded
    | UpdateRequested
    | AbortRequested
    | Paused
    | Tick
)

# ---- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Save:
    """Write to the ledger, durably, before any later effect."""

    record: Record


@dataclass(frozen=True, slots=True)
class Welcome:
    session: int
    trainer_term: Term


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End a session with this error; its agent lives elsewhere or was fenced."""

    session: int
    error: e.WeightplaneError


@dataclass(frozen=True, slots=True)
class BroadcastState:
    """Terms or served sets changed: every session gets the fleet's state."""


@dataclass(frozen=True, slots=True)
class UpdatePlanned:
    """The answer to UpdateRequested."""

    update: UpdateTransaction


@dataclass(frozen=True, slots=True)
class UpdateChanged:
    update_id: UpdateId


@dataclass(frozen=True, slots=True)
class ViewChanged:
    """Something that people or clients see changed."""


Effect = Save | Welcome | CloseSession | BroadcastState | UpdatePlanned | UpdateChanged | ViewChanged

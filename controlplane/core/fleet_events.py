"""What happens to a coordinator: the events of `FleetCore`."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core import errors as e
from controlplane.core.engine_state import EngineState, Held, Refusal
from controlplane.core.fleet_records import CheckpointKept, LostRank
from controlplane.core.plan import HOST_MEMORY, EnginePlace, Load, RankPlace, Transport
from controlplane.core.versions import (
    EngineId,
    Incarnation,
    ModelName,
    RunId,
    Term,
    TrainerId,
    UpdateId,
)


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
    refused: Refusal | None = None


@dataclass(frozen=True, slots=True)
class EngineReported:
    session: int
    state: EngineState
    gate_open: bool
    refused: Refusal | None = None


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
    transports: frozenset[Transport] = HOST_MEMORY
    load: Load | None = None
    software: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainerReported:
    session: int
    term: Term
    step: int | None
    phase: str
    progress: int
    holds_devices: bool = False
    lost: tuple[LostRank, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """`goodbye`: the agent said so. Else it is silence."""

    session: int
    goodbye: bool


@dataclass(frozen=True, slots=True)
class Avoided:
    """A way to one life of an engine that failed before."""

    engine_id: EngineId
    incarnation: Incarnation
    transport: Transport
    cause: str


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
    layout_digest: bytes = b""
    byte_count: int = 0
    avoid: tuple[Avoided, ...] = ()
    base: Held | None = None
    """The version whose bytes the trainer still has."""


@dataclass(frozen=True, slots=True)
class RollbackRequested:
    """Bring an earlier version's weights back, as a new number (INV-5)."""

    update_id: UpdateId
    request_id: str
    run_id: RunId
    model: ModelName
    number: int


@dataclass(frozen=True, slots=True)
class AbortRequested:
    run_id: RunId
    update_id: UpdateId
    term: Term
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointPublished:
    """A trainer wrote a committed version where engines can read it."""

    run_id: RunId
    term: Term
    checkpoint: CheckpointKept


@dataclass(frozen=True, slots=True)
class CheckpointRetired:
    """A trainer is about to delete one."""

    run_id: RunId
    model: ModelName
    term: Term
    number: int


@dataclass(frozen=True, slots=True)
class KeepRequested:
    """An engine is to stay at a version while the fleet moves on."""

    run_id: RunId
    engine_id: EngineId
    model: ModelName
    """Of an engine that is not known here; empty: what it said itself."""
    number: int


@dataclass(frozen=True, slots=True)
class ReleaseRequested:
    """It is to go with the fleet again."""

    run_id: RunId
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class CarryEnded:
    """The coordinator's own writer is done with one engine, however that ended."""

    update_id: UpdateId
    engine_id: EngineId
    error: e.WeightplaneError | None


@dataclass(frozen=True, slots=True)
class LedgerAccepted:
    """A person takes an older copy of the ledger as it is."""

    run_id: RunId
    accepted_by: str


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
    | RollbackRequested
    | AbortRequested
    | CheckpointPublished
    | CheckpointRetired
    | KeepRequested
    | ReleaseRequested
    | CarryEnded
    | LedgerAccepted
    | Paused
    | Tick
)

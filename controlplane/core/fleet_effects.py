"""What the core of a coordinator wants done: the effects of `FleetCore`, to be carried out in their order.

They say what, never how; who carries one out tells of its end by an event, where the core must know it.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core import errors as e
from controlplane.core.fleet_records import CheckpointKept, Record
from controlplane.core.plan import EnginePlace
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import Term, UpdateId, WeightVersion


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
class Carry:
    """The coordinator brings one version to one engine, from a checkpoint, under its own term."""

    update_id: UpdateId
    engine: EnginePlace
    version: WeightVersion
    checkpoint: CheckpointKept
    waits_for_go: bool
    """It belongs to an update of the fleet, and commits when that goes; else as soon as the engine is ready."""


@dataclass(frozen=True, slots=True)
class StartCarry:
    carry: Carry


@dataclass(frozen=True, slots=True)
class ViewChanged:
    """Something that people or clients see changed."""


Effect = Save | Welcome | CloseSession | BroadcastState | UpdatePlanned | UpdateChanged | StartCarry | ViewChanged

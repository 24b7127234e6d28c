"""Disks that keep what was synced, and lose the rest when their process dies.

The ledger's records are those of `MemoryLedger`; `kept` answers what a reader of the disk would find now, which is
what INV-9 is measured with.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.core.fleet_records import (
    CheckpointGone,
    CheckpointKept,
    EngineKept,
    EngineReleased,
    FloorRaised,
    FrozenServed,
    Record,
    Recovered,
    TermGiven,
    UpdateBegan,
    UpdateDecided,
    UpdateRolled,
    UpdateWentGo,
)
from controlplane.core.versions import FROZEN, NO_TERM, EngineId, ModelName, RunId, Term, UpdateId, WeightVersion
from controlplane.ledger import MemoryLedger


@dataclass
class Kept:
    """What is on the disk, by what people ask for."""

    terms: dict[ModelName, Term] = field(default_factory=dict)
    began: dict[UpdateId, WeightVersion] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    """How many updates were given for each request id."""
    went_go: set[UpdateId] = field(default_factory=set)
    rolled: set[UpdateId] = field(default_factory=set)
    decided: dict[UpdateId, UpdateDecided] = field(default_factory=dict)
    served: dict[ModelName, tuple[WeightVersion, ...]] = field(default_factory=dict)
    checkpoints: dict[tuple[ModelName, int], CheckpointKept] = field(default_factory=dict)
    stays: dict[EngineId, EngineKept] = field(default_factory=dict)
    """Engines that stay at a version while the fleet moves on."""

    def note(self, record: Record) -> None:
        match record:
            case TermGiven():
                self.terms[record.model] = record.term
            case UpdateBegan():
                self.began[record.update_id] = record.version
                self.requests[record.request_id] += 1
            case UpdateWentGo():
                self.went_go.add(record.update_id)
            case UpdateDecided():
                self.decided[record.update_id] = record
                self.served[record.model] = record.served
            case UpdateRolled():
                self.rolled.add(record.update_id)
                self.served[record.model] = record.served
            case FrozenServed():
                self.served[record.model] = (FROZEN,)
            case CheckpointKept():
                self.checkpoints[(record.model, record.version.number)] = record
            case CheckpointGone():
                self.checkpoints.pop((record.model, record.number), None)
            case EngineKept():
                self.stays[record.engine_id] = record
            case EngineReleased():
                self.stays.pop(record.engine_id, None)
            case FloorRaised():
                self.terms.update(dict(record.terms))
            case _:
                pass


class LedgerDisk:
    """The coordinator's ledger. `save` writes and syncs; `between` is called in between. `clock`: Unix seconds."""

    def __init__(self, between: Callable[[], None], clock: Callable[[], float] = lambda: 0.0) -> None:
        self.kept = Kept()
        self._between = between
        self._clock = clock
        self._ledger = MemoryLedger(clock)
        self._unsynced: list[Record] = []

    def open(self, run_id: RunId) -> Recovered:
        self._unsynced.clear()
        return self._ledger.open(run_id)

    def save(self, record: Record) -> None:
        self._unsynced.append(record)
        self._between()
        self.sync()

    def sync(self) -> None:
        for record in self._unsynced:
            self._ledger.save(record)
            self.kept.note(record)
        self._unsynced.clear()

    def close(self) -> None:
        self._unsynced.clear()

    def copy(self) -> tuple[MemoryLedger, Kept]:
        """What a backup taken now would hold."""
        return self._copied((self._ledger, self.kept))

    def restore(self, backup: tuple[MemoryLedger, Kept]) -> None:
        self._ledger, self.kept = self._copied(backup)

    def _copied(self, disk: tuple[MemoryLedger, Kept]) -> tuple[MemoryLedger, Kept]:
        """The clock is the world's, and goes on for every copy."""
        return copy.deepcopy(disk, {id(self._clock): self._clock})


@dataclass(frozen=True, slots=True)
class Remembered:
    """Zeros: nothing was seen yet."""

    term: Term = NO_TERM
    coordinator_term: Term = NO_TERM
    number: int = 0


class AgentDisk:
    """The highest terms and number that an engine agent saw."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.synced = Remembered()
        self._between = between

    def save(self, remembered: Remembered) -> None:
        self._between()
        self.synced = remembered

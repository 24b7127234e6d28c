"""The ledger's twin in memory: for tests and the simulator. What it holds dies with it."""

from __future__ import annotations

from controlplane.core.errors import LedgerError
from controlplane.core.fleet_records import (
    EngineForgotten,
    EngineKnown,
    ModelRecord,
    Record,
    Recovered,
    TermGiven,
    UpdateBegan,
    UpdateDecided,
    UpdateRolled,
    UpdateWentGo,
)
from controlplane.core.versions import EngineId, ModelName, RunId, Term, UpdateId


class MemoryLedger:
    """Keeps records over several `open`s of the same object, as a file would."""

    def __init__(self) -> None:
        self._run_id: RunId | None = None
        self._term = 0
        self._leases: dict[ModelName, TermGiven] = {}
        self._engines: dict[EngineId, EngineKnown] = {}
        self._updates: dict[UpdateId, UpdateBegan] = {}
        self._went_go: set[UpdateId] = set()
        self._rolled: dict[UpdateId, UpdateRolled] = {}
        self._decided: dict[UpdateId, UpdateDecided] = {}

    def open(self, run_id: RunId) -> Recovered:
        if self._run_id not in (None, run_id):
            raise LedgerError(path="memory", cause=f"it belongs to run {self._run_id}, not {run_id}")
        self._run_id = run_id
        self._term += 1
        still_open = [u for u in self._updates if u not in self._decided]
        return Recovered(
            coordinator_term=Term(self._term),
            next_number=1 + max((u.version.number for u in self._updates.values()), default=0),
            models=self._models(),
            leases=tuple(self._leases.values()),
            engines=tuple(self._engines.values()),
            open_updates=tuple((self._updates[u], u in self._went_go) for u in still_open),
            rolled=frozenset(u for u in still_open if u in self._rolled),
        )

    def save(self, record: Record) -> None:
        match record:
            case TermGiven():
                self._leases[record.model] = record
            case EngineKnown():
                self._engines[record.engine_id] = record
            case EngineForgotten():
                self._engines.pop(record.engine_id, None)
            case UpdateBegan():
                if any(u.version.number == record.version.number for u in self._updates.values()):
                    raise LedgerError(path="memory", cause=f"number {record.version.number} was given before")
                self._updates[record.update_id] = record
            case UpdateWentGo():
                self._went_go.add(record.update_id)
            case UpdateRolled():
                self._rolled[record.update_id] = record
            case UpdateDecided():
                self._decided[record.update_id] = record

    def close(self) -> None:
        pass

    def _models(self) -> dict[ModelName, ModelRecord]:
        models = {m: ModelRecord(term=lease.term) for m, lease in self._leases.items()}
        told: list[UpdateRolled | UpdateDecided] = [*self._rolled.values(), *self._decided.values()]
        for written in told:
            record = models.setdefault(written.model, ModelRecord())
            if written.ordinal >= record.ordinal:
                record.served, record.ordinal = written.served, written.ordinal
        return models

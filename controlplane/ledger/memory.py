"""The ledger's twin in memory: for tests and the simulator. What it holds dies with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from controlplane.core.errors import LedgerError
from controlplane.core.fleet_records import (
    REQUEST_ID_SECONDS,
    CheckpointGone,
    CheckpointKept,
    EngineForgotten,
    EngineKept,
    EngineKnown,
    EngineReleased,
    FloorRaised,
    FrozenServed,
    ModelRecord,
    Record,
    Recovered,
    RequestKnown,
    TermGiven,
    UpdateBegan,
    UpdateDecided,
    UpdateRolled,
    UpdateWentGo,
)
from controlplane.core.lag import Commits, FleetCommit
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import FROZEN, NO_TERM, EngineId, ModelName, RunId, Term, UpdateId


@dataclass
class _Update:
    began: UpdateBegan
    began_at: float
    went_go: bool = False
    rolled: bool = False
    decided: bool = False
    committed: bool = False


class MemoryLedger:
    """Keeps records over several `open`s of the same object, as a file would."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix seconds."""
        self._clock = clock
        self._run_id: RunId | None = None
        self._term = NO_TERM
        self._floor = 0
        self._floor_terms: dict[ModelName, Term] = {}
        self._leases: dict[ModelName, TermGiven] = {}
        self._engines: dict[EngineId, EngineKnown] = {}
        self._kept: dict[EngineId, EngineKept] = {}
        self._updates: dict[UpdateId, _Update] = {}
        self._served: dict[ModelName, ModelRecord] = {}
        """Without terms: those are the leases' and the floors'."""

    def open(self, run_id: RunId) -> Recovered:
        if self._run_id not in (None, run_id):
            raise LedgerError(path="memory", cause=f"it belongs to run {self._run_id}, not {run_id}")
        self._run_id = run_id
        self._term = Term(self._term + 1)
        still_open = [u for u in self._updates.values() if not u.decided]
        return Recovered(
            coordinator_term=self._term,
            next_number=self._next_number,
            models=self._models(),
            leases=tuple(v for m, v in sorted(self._leases.items()) if v.term >= self._floor_terms.get(m, NO_TERM)),
            engines=tuple(known for _, known in sorted(self._engines.items())),
            open_updates=tuple((u.began, u.went_go) for u in still_open),
            rolled=frozenset(u.began.update_id for u in still_open if u.rolled),
            requests=self._requests(self._clock()),
            kept=tuple(kept for _, kept in sorted(self._kept.items())),
        )

    def save(self, record: Record) -> None:
        match record:
            case TermGiven():
                self._give_term(record)
            case EngineKnown():
                self._engines[record.engine_id] = record
            case EngineForgotten():
                self._engines.pop(record.engine_id, None)
            case EngineKept():
                self._kept[record.engine_id] = record
            case EngineReleased():
                self._kept.pop(record.engine_id, None)
            case UpdateBegan():
                if record.version.number < self._next_number:
                    raise LedgerError(path="memory", cause=f"number {record.version.number} was given before")
                self._updates[record.update_id] = _Update(record, self._clock())
            case UpdateWentGo():
                self._update(record.update_id).went_go = True
            case UpdateRolled():
                self._update(record.update_id).rolled = True
                self._serve(record)
            case UpdateDecided():
                update = self._update(record.update_id)
                update.decided, update.committed = True, record.phase in (Phase.COMMITTED, Phase.DEGRADED)
                self._serve(record)
            case FrozenServed():
                model = self._model(record.model)
                model.served, model.digests = (FROZEN,), {FROZEN: record.content_digest}
            case CheckpointKept():
                self._model(record.model).checkpoints[record.version.number] = record
            case CheckpointGone():
                self._model(record.model).checkpoints.pop(record.number, None)
            case FloorRaised():
                self._raise_floor(record)

    def close(self) -> None:
        pass

    @property
    def _next_number(self) -> int:
        return 1 + max((self._floor, *(u.began.version.number for u in self._updates.values())))

    def _give_term(self, record: TermGiven) -> None:
        held = self._leases.get(record.model)
        floor = self._floor_terms.get(record.model, NO_TERM)
        if (held is not None and record.term < held.term) or record.term <= floor:
            raise LedgerError(path="memory", cause=f"term {record.term} of {record.model} was given before")
        self._leases[record.model] = record

    def _update(self, update_id: UpdateId) -> _Update:
        """An open one: what is decided is decided."""
        update = self._updates.get(update_id)
        if update is None or update.decided:
            raise LedgerError(path="memory", cause=f"update {update_id} never began, or is decided")
        return update

    def _serve(self, record: UpdateRolled | UpdateDecided) -> None:
        version = self._updates[record.update_id].began.version
        model = self._model(record.model)
        told = {version: record.content_digest} if record.content_digest else {}
        known = model.digests | told
        model.served, model.ordinal = record.served, record.ordinal
        model.digests = {v: known[v] for v in record.served if v in known}

    def _raise_floor(self, record: FloorRaised) -> None:
        self._floor = max(self._floor, record.number)
        self._term = max(self._term, record.coordinator_term)
        for model, term in record.terms:
            self._floor_terms[model] = max(term, self._floor_terms.get(model, NO_TERM))

    def _requests(self, now: float) -> tuple[RequestKnown, ...]:
        return tuple(
            RequestKnown(
                request_id=u.began.request_id,
                update_id=u.began.update_id,
                model=u.began.model,
                version=u.began.version,
                layout_digest=u.began.layout_digest,
                age_seconds=max(0.0, now - u.began_at),
            )
            for u in sorted(self._updates.values(), key=lambda u: u.began_at)
            if u.began_at > now - REQUEST_ID_SECONDS
        )

    def _model(self, name: ModelName) -> ModelRecord:
        return self._served.setdefault(name, ModelRecord())

    def _models(self) -> dict[ModelName, ModelRecord]:
        """Copies: whoever opened the ledger changes them."""
        terms = {m: lease.term for m, lease in self._leases.items()}
        terms |= {m: max(term, terms.get(m, NO_TERM)) for m, term in self._floor_terms.items()}
        return {
            name: replace(
                kept,
                term=terms.get(name, NO_TERM),
                digests=dict(kept.digests),
                checkpoints=dict(kept.checkpoints),
                commits=self._commits(name, kept.ordinal),
            )
            for name in [*self._served, *terms]
            for kept in [self._served.get(name, ModelRecord())]
        }

    def _commits(self, model: ModelName, ordinal: int) -> Commits:
        """The latest: what was committed last is the commit with the model's ordinal, and they are dense."""
        served = (
            u.began.version for u in self._updates.values() if u.began.model == model and (u.committed or u.rolled)
        )
        commits = Commits()
        commits.note(FleetCommit(v, ordinal - behind) for behind, v in enumerate(sorted(served, reverse=True)))
        return commits

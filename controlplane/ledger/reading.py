"""What the tables say, as the coordinator's core takes it up.

Small tables are read whole; of the updates, which are kept for ever, only those without a decision and those whose
request is still remembered, each by an index.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from controlplane.core.fleet_records import (
    REQUEST_ID_SECONDS,
    CheckpointKept,
    EngineAsked,
    EngineKept,
    EngineKnown,
    ModelRecord,
    Recovered,
    RequestKnown,
    TermGiven,
    UpdateBegan,
)
from controlplane.core.lag import MAX_COMMITS, FleetCommit
from controlplane.core.versions import (
    FROZEN,
    EngineId,
    Incarnation,
    ModelName,
    Term,
    TrainerId,
    UpdateId,
    WeightVersion,
)


def recover(db: sqlite3.Connection, now: float) -> Recovered:
    """Everything that a coordinator begins with. `now`: Unix seconds.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    floors = floor_terms(db)
    leases = list(_leases(db))
    open_updates = list(_open_updates(db))
    return Recovered(
        coordinator_term=Term(coordinator_term(db)),
        next_number=next_number(db),
        models=_models(db, leases, floors),
        # A lease below the floor was taken over, in the copy that is lost.
        leases=tuple(lease for lease in leases if lease.term >= floors.get(lease.model, 0)),
        engines=tuple(_engines(db)),
        open_updates=tuple((began, went_go) for began, went_go, _ in open_updates),
        rolled=frozenset(began.update_id for began, _, rolled in open_updates if rolled),
        requests=tuple(_requests(db, now)),
        kept=tuple(_kept(db)),
    )


def owner(db: sqlite3.Connection) -> str:
    """The run that the ledger belongs to."""
    return _meta(db, "run_id")


def coordinator_term(db: sqlite3.Connection) -> int:
    """The latest coordinator's."""
    return int(_meta(db, "coordinator_term"))


def next_number(db: sqlite3.Connection) -> int:
    """Above every number that was given, or that a floor gave up."""
    given = db.execute("SELECT coalesce(max(number), 0) FROM updates").fetchone()[0]
    floor = db.execute("SELECT coalesce(max(number), 0) FROM floors").fetchone()[0]
    return 1 + max(int(given), int(floor))


def floor_terms(db: sqlite3.Connection) -> dict[ModelName, Term]:
    """By model: no term up to it is given again."""
    return {ModelName(m): Term(t) for m, t in db.execute("SELECT model, max(term) FROM floor_terms GROUP BY model")}


def digests(db: sqlite3.Connection, model: ModelName) -> dict[int, bytes]:
    """By number: the contents of what a model serves; empty where none was told."""
    return dict(db.execute("SELECT number, content_digest FROM served WHERE model = ?", (model,)))


def _leases(db: sqlite3.Connection) -> Iterator[TermGiven]:
    rows = db.execute("SELECT model, term, trainer_id, incarnation FROM leases ORDER BY model")
    for model, term, trainer_id, incarnation in rows:
        yield TermGiven(ModelName(model), Term(term), TrainerId(trainer_id), Incarnation(incarnation))


def _engines(db: sqlite3.Connection) -> Iterator[EngineKnown]:
    for engine_id, model in db.execute("SELECT engine_id, model FROM engines ORDER BY engine_id"):
        yield EngineKnown(EngineId(engine_id), ModelName(model))


def _kept(db: sqlite3.Connection) -> Iterator[EngineKept]:
    rows = db.execute("SELECT engine_id, model, term, number, content_digest FROM kept_engines ORDER BY engine_id")
    for engine_id, model, term, number, digest in rows:
        yield EngineKept(EngineId(engine_id), ModelName(model), WeightVersion(number, Term(term)), digest)


def _models(
    db: sqlite3.Connection, leases: list[TermGiven], floors: dict[ModelName, Term]
) -> dict[ModelName, ModelRecord]:
    models: dict[ModelName, ModelRecord] = {}

    def model(name: str) -> ModelRecord:
        return models.setdefault(ModelName(name), ModelRecord())

    for lease in leases:
        model(lease.model).term = lease.term
    for name, term in floors.items():
        model(name).term = max(term, model(name).term)
    for name, ordinal in db.execute("SELECT model, ordinal FROM models"):
        model(name).ordinal = ordinal
    for name, term, number, digest in db.execute(
        "SELECT model, term, number, content_digest FROM served ORDER BY number"
    ):
        version = WeightVersion(number, Term(term))
        model(name).served = (*model(name).served, version)
        if digest or version == FROZEN:  # a frozen model's is what it is, even if its engines told none
            model(name).digests[version] = digest
    for kept in _checkpoints(db):
        model(kept.model).checkpoints[kept.version.number] = kept
    for name, record in models.items():
        record.commits.note(_commits(db, name, record.ordinal))
    return models


def _commits(db: sqlite3.Connection, model: ModelName, ordinal: int) -> Iterator[FleetCommit]:
    """The latest: what was committed last is the commit with the model's ordinal, and they are dense."""
    rows = db.execute(
        "SELECT term, number FROM updates WHERE model = ? AND (phase IN ('committed', 'degraded') OR rolled) "
        "ORDER BY number DESC LIMIT ?",
        (model, MAX_COMMITS),
    )
    for behind, (term, number) in enumerate(rows.fetchall()):
        yield FleetCommit(WeightVersion(number, Term(term)), ordinal - behind)


def _checkpoints(db: sqlite3.Connection) -> Iterator[CheckpointKept]:
    rows = db.execute(
        "SELECT model, number, term, name, layout_digest, content_digest, tensor_count, file_count, byte_count "
        "FROM checkpoints ORDER BY number"
    )
    for model, number, term, *rest in rows:
        yield CheckpointKept(ModelName(model), WeightVersion(number, Term(term)), *rest)


def _open_updates(db: sqlite3.Connection) -> Iterator[tuple[UpdateBegan, bool, bool]]:
    """Each with whether it went go, and whether it rolled."""
    rows = db.execute(
        "SELECT update_id, request_id, model, term, number, step, layout_digest, byte_count, restores_term, "
        "restores_number, phase, rolled FROM updates WHERE phase IN ('preparing', 'go') ORDER BY number"
    )
    for row in rows.fetchall():
        update_id, request_id, model, term, number, step, layout, byte_count, *restores, phase, rolled = row
        began = UpdateBegan(
            update_id=UpdateId(update_id),
            request_id=request_id,
            model=ModelName(model),
            version=WeightVersion(number, Term(term)),
            step=step,
            engines=tuple(_asked(db, update_id)),
            layout_digest=layout,
            byte_count=byte_count,
            restores=_version(*restores),
        )
        yield began, phase == "go", bool(rolled)


def _asked(db: sqlite3.Connection, update_id: str) -> Iterator[EngineAsked]:
    """In the order of the record."""
    rows = db.execute(
        "SELECT engine_id, incarnation, required, grp, unit FROM update_engines WHERE update_id = ? ORDER BY rowid",
        (update_id,),
    )
    for engine_id, incarnation, required, group, unit in rows:
        yield EngineAsked(EngineId(engine_id), Incarnation(incarnation), bool(required), group, unit)


def _requests(db: sqlite3.Connection, now: float) -> Iterator[RequestKnown]:
    """A clock that was put back makes none of them forgotten early."""
    rows = db.execute(
        "SELECT request_id, update_id, model, term, number, layout_digest, began_at FROM updates WHERE began_at > ? "
        "ORDER BY began_at, number",
        (now - REQUEST_ID_SECONDS,),
    )
    for request_id, update_id, model, term, number, layout, began_at in rows:
        yield RequestKnown(
            request_id=request_id,
            update_id=UpdateId(update_id),
            model=ModelName(model),
            version=WeightVersion(number, Term(term)),
            layout_digest=layout,
            age_seconds=max(0.0, now - began_at),
        )


def _version(term: int | None, number: int | None) -> WeightVersion | None:
    return None if term is None or number is None else WeightVersion(number, Term(term))


def _meta(db: sqlite3.Connection, key: str) -> str:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    if row is None:
        raise sqlite3.DatabaseError(f"it has no {key}")
    return str(row[0])

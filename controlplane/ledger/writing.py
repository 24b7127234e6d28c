"""One record into the tables. Each function runs inside a transaction of the caller's.

What was given before is never given again, and what never began has no fate: such a record is refused with an
IntegrityError, like one that a table's own rules refuse.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from controlplane.core.fleet_records import (
    CheckpointGone,
    CheckpointKept,
    EngineForgotten,
    EngineKept,
    EngineKnown,
    EngineReleased,
    FloorRaised,
    FrozenServed,
    Record,
    TermGiven,
    UpdateBegan,
    UpdateDecided,
    UpdateRolled,
    UpdateWentGo,
)
from controlplane.core.update_outcomes import Outcome
from controlplane.core.versions import FROZEN, ModelName, UpdateId, WeightVersion
from controlplane.ledger.reading import coordinator_term, digests, floor_terms, next_number

_OPEN = "update_id = ? AND phase IN ('preparing', 'go')"
"""What is decided is decided: nothing opens it again."""


def write(db: sqlite3.Connection, record: Record, now: float) -> None:
    """`now`: Unix seconds.

    Raises:
        sqlite3.Error: it is not written.
    """
    _WRITERS[type(record)](db, record, now)


def set_coordinator_term(db: sqlite3.Connection, term: int) -> None:
    db.execute("UPDATE meta SET value = ? WHERE key = 'coordinator_term'", (str(term),))


# ---- terms and engines ----


def _term_given(db: sqlite3.Connection, record: TermGiven, _: float) -> None:
    held = db.execute("SELECT term FROM leases WHERE model = ?", (record.model,)).fetchone()
    if (held and record.term < held[0]) or record.term <= floor_terms(db).get(record.model, 0):
        raise sqlite3.IntegrityError(f"term {record.term} of {record.model} was given before")
    db.execute(
        "INSERT OR REPLACE INTO leases (model, term, trainer_id, incarnation) VALUES (?, ?, ?, ?)",
        (record.model, record.term, record.trainer_id, record.incarnation),
    )


def _engine_known(db: sqlite3.Connection, record: EngineKnown, _: float) -> None:
    db.execute("INSERT OR REPLACE INTO engines (engine_id, model) VALUES (?, ?)", (record.engine_id, record.model))


def _engine_forgotten(db: sqlite3.Connection, record: EngineForgotten, _: float) -> None:
    db.execute("DELETE FROM engines WHERE engine_id = ?", (record.engine_id,))


def _engine_kept(db: sqlite3.Connection, record: EngineKept, now: float) -> None:
    version = record.version
    db.execute(
        "INSERT OR REPLACE INTO kept_engines (engine_id, model, term, number, content_digest, kept_at) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (record.engine_id, record.model, version.term, version.number, record.content_digest, now),
    )


def _engine_released(db: sqlite3.Connection, record: EngineReleased, _: float) -> None:
    db.execute("DELETE FROM kept_engines WHERE engine_id = ?", (record.engine_id,))


def _floor_raised(db: sqlite3.Connection, record: FloorRaised, now: float) -> None:
    cursor = db.execute(
        "INSERT INTO floors (number, known_number, coordinator_term, accepted_by, accepted_at) VALUES (?, ?, ?, ?, ?)",
        (record.number, next_number(db) - 1, record.coordinator_term, record.accepted_by, now),
    )
    db.executemany(
        "INSERT INTO floor_terms (floor_id, model, term) VALUES (?, ?, ?)",
        [(cursor.lastrowid, model, term) for model, term in record.terms],
    )
    set_coordinator_term(db, max(record.coordinator_term, coordinator_term(db)))


# ---- updates ----


def _update_began(db: sqlite3.Connection, record: UpdateBegan, now: float) -> None:
    if record.version.number < next_number(db):
        raise sqlite3.IntegrityError(f"number {record.version.number} was given before")
    if record.layout_digest:
        db.execute(
            "INSERT INTO layouts (digest, byte_count, first_seen_at) VALUES (?, ?, ?) "
            "ON CONFLICT (digest) DO UPDATE SET byte_count = max(byte_count, excluded.byte_count)",
            (record.layout_digest, record.byte_count, now),
        )
    restores = record.restores
    db.execute(
        "INSERT INTO updates (number, update_id, request_id, model, term, step, phase, layout_digest, byte_count, "
        "restores_term, restores_number, began_at) VALUES (?, ?, ?, ?, ?, ?, 'preparing', ?, ?, ?, ?, ?)",
        (
            record.version.number,
            record.update_id,
            record.request_id,
            record.model,
            record.version.term,
            record.step,
            record.layout_digest,
            record.byte_count,
            None if restores is None else restores.term,
            None if restores is None else restores.number,
            now,
        ),
    )
    db.executemany(
        "INSERT INTO update_engines (update_id, engine_id, incarnation, required, grp, unit) VALUES (?, ?, ?, ?, ?, ?)",
        [(record.update_id, *asked) for asked in record.engines],
    )


def _update_went_go(db: sqlite3.Connection, record: UpdateWentGo, _: float) -> None:
    _one(db.execute(f"UPDATE updates SET phase = 'go' WHERE {_OPEN}", (record.update_id,)), record.update_id)


def _update_rolled(db: sqlite3.Connection, record: UpdateRolled, _: float) -> None:
    _one(db.execute(f"UPDATE updates SET rolled = 1 WHERE {_OPEN}", (record.update_id,)), record.update_id)
    _write_digest(db, record)
    _write_served(db, record)


def _update_decided(db: sqlite3.Connection, record: UpdateDecided, now: float) -> None:
    cursor = db.execute(
        f"UPDATE updates SET phase = ?, cause = ?, decided_at = ? WHERE {_OPEN}",
        (record.phase.value, record.cause, now, record.update_id),
    )
    _one(cursor, record.update_id)
    _write_digest(db, record)
    _write_outcomes(db, record.update_id, record.outcomes)
    _write_served(db, record)


def _write_digest(db: sqlite3.Connection, record: UpdateRolled | UpdateDecided) -> None:
    """One that was told stays, though whoever told it is gone."""
    if record.content_digest:
        db.execute(
            "UPDATE updates SET content_digest = ? WHERE update_id = ?", (record.content_digest, record.update_id)
        )


def _write_outcomes(db: sqlite3.Connection, update_id: UpdateId, outcomes: tuple[Outcome, ...]) -> None:
    db.executemany(
        "INSERT INTO update_engines (update_id, engine_id, incarnation, required, grp, unit, awaited, stage, lost, "
        "error_reason, error_message, content_digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (update_id, engine_id) DO UPDATE SET incarnation = excluded.incarnation, "
        "required = excluded.required, grp = excluded.grp, unit = excluded.unit, awaited = excluded.awaited, "
        "stage = excluded.stage, lost = excluded.lost, error_reason = excluded.error_reason, "
        "error_message = excluded.error_message, content_digest = excluded.content_digest",
        [
            (
                update_id,
                o.engine_id,
                o.incarnation,
                o.required,
                o.group,
                o.unit,
                o.awaited,
                o.stage.value if o.stage else None,
                o.lost,
                o.error_reason,
                o.error_message,
                o.content_digest,
            )
            for o in outcomes
        ],
    )


def _one(cursor: sqlite3.Cursor, update_id: UpdateId) -> None:
    if cursor.rowcount != 1:
        raise sqlite3.IntegrityError(f"update {update_id} never began, or is decided")


# ---- what is served, and what can be brought ----


def _write_served(db: sqlite3.Connection, record: UpdateRolled | UpdateDecided) -> None:
    """The contents of what was served stay known while it is; that of the update's version is the update's."""
    number, digest = db.execute(
        "SELECT number, content_digest FROM updates WHERE update_id = ?", (record.update_id,)
    ).fetchone()
    known = digests(db, record.model) | {number: digest}
    db.execute("INSERT OR REPLACE INTO models (model, ordinal) VALUES (?, ?)", (record.model, record.ordinal))
    _replace_served(db, record.model, {v: known.get(v.number, b"") for v in record.served})


def _frozen_served(db: sqlite3.Connection, record: FrozenServed, _: float) -> None:
    db.execute("INSERT OR IGNORE INTO models (model, ordinal) VALUES (?, 0)", (record.model,))
    _replace_served(db, record.model, {FROZEN: record.content_digest})


def _replace_served(db: sqlite3.Connection, model: ModelName, served: dict[WeightVersion, bytes]) -> None:
    db.execute("DELETE FROM served WHERE model = ?", (model,))
    db.executemany(
        "INSERT INTO served (model, term, number, content_digest) VALUES (?, ?, ?, ?)",
        [(model, version.term, version.number, digest) for version, digest in served.items()],
    )


def _checkpoint_kept(db: sqlite3.Connection, record: CheckpointKept, now: float) -> None:
    db.execute(
        "INSERT OR REPLACE INTO checkpoints (model, number, term, name, layout_digest, content_digest, tensor_count, "
        "file_count, byte_count, kept_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            record.model,
            record.version.number,
            record.version.term,
            record.name,
            record.layout_digest,
            record.content_digest,
            record.tensor_count,
            record.file_count,
            record.byte_count,
            now,
        ),
    )


def _checkpoint_gone(db: sqlite3.Connection, record: CheckpointGone, _: float) -> None:
    db.execute("DELETE FROM checkpoints WHERE model = ? AND number = ?", (record.model, record.number))


_WRITERS: Mapping[type, Callable[[sqlite3.Connection, Any, float], None]] = {
    TermGiven: _term_given,
    EngineKnown: _engine_known,
    EngineForgotten: _engine_forgotten,
    EngineKept: _engine_kept,
    EngineReleased: _engine_released,
    UpdateBegan: _update_began,
    UpdateWentGo: _update_went_go,
    UpdateRolled: _update_rolled,
    UpdateDecided: _update_decided,
    FrozenServed: _frozen_served,
    CheckpointKept: _checkpoint_kept,
    CheckpointGone: _checkpoint_gone,
    FloorRaised: _floor_raised,
}

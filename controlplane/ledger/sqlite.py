"""The ledger in SQLite: write-ahead log, synchronous=FULL, strict tables, one transaction a record.

A commit costs one fsync (measured: 0.65 ms); NORMAL would be 30 times faster and lose the tail when the power fails.
The file is locked for the life of the coordinator, so a second one on the same directory is told so.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from controlplane.core.errors import LedgerError
from controlplane.core.fleet_records import (
    EngineAsked,
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
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, TrainerId, UpdateId, WeightVersion

APPLICATION_ID = 0x57504C31
"""Marks the file as ours: "WPL1"."""
SCHEMA_VERSION = 1


class SqliteLedger:
    """A ledger file. Use from one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None

    def open(self, run_id: RunId) -> Recovered:
        with self._errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # No wait for a lock: whoever holds it is another coordinator.
            self._db = sqlite3.connect(self._path, isolation_level=None, timeout=0, check_same_thread=False)
            self._check_file()
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._prepare(run_id)
            return self._recover()

    def save(self, record: Record) -> None:
        with self._transaction() as db:
            _write(db, record)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _check_file(self) -> None:
        db = self._connection()
        application = db.execute("PRAGMA application_id").fetchone()[0]
        empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if application != APPLICATION_ID and not (application == 0 and empty):
            raise LedgerError(path=str(self._path), cause="it is a database of another program")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise LedgerError(
                path=str(self._path), cause=f"its schema is version {version}, this program knows {SCHEMA_VERSION}"
            )

    def _prepare(self, run_id: RunId) -> None:
        """Create the tables if need be, check the run, and begin a life: the term is durable when this returns."""
        with self._transaction() as db:
            if db.execute("PRAGMA user_version").fetchone()[0] == 0:
                for statement in _statements(files(__package__).joinpath("schema.sql").read_text()):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
                db.execute("INSERT INTO meta VALUES ('run_id', ?), ('coordinator_term', '0')", (run_id,))
            owner = _meta(db, "run_id")
            if owner != run_id:
                raise LedgerError(path=str(self._path), cause=f"it belongs to run {owner}, not {run_id}")
            term = int(_meta(db, "coordinator_term")) + 1
            db.execute("UPDATE meta SET value = ? WHERE key = 'coordinator_term'", (str(term),))

    def _recover(self) -> Recovered:
        db = self._connection()
        leases = [
            TermGiven(ModelName(m), Term(t), TrainerId(i), Incarnation(inc))
            for m, t, i, inc in db.execute("SELECT model, term, trainer_id, incarnation FROM leases ORDER BY model")
        ]
        engines = [
            EngineKnown(EngineId(i), ModelName(m))
            for i, m in db.execute("SELECT engine_id, model FROM engines ORDER BY engine_id")
        ]
        return Recovered(
            coordinator_term=Term(int(_meta(db, "coordinator_term"))),
            next_number=1 + db.execute("SELECT coalesce(max(number), 0) FROM updates").fetchone()[0],
            models=_models(db, leases),
            leases=tuple(leases),
            engines=tuple(engines),
            open_updates=tuple(_open_updates(db)),
            rolled=_rolled(db),
        )

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise LedgerError(path=str(self._path), cause="it is not open")
        return self._db

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._connection()
        with self._errors():
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            locked = "locked" in str(error)
            cause = "another coordinator has it open" if locked else str(error)
            raise LedgerError(path=str(self._path), cause=cause) from error
        except OSError as error:
            raise LedgerError(path=str(self._path), cause=error.strerror or str(error)) from error


def _write(db: sqlite3.Connection, record: Record) -> None:
    match record:
        case TermGiven(model, term, trainer_id, incarnation):
            db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", (model, term, trainer_id, incarnation))
        case EngineKnown(engine_id, model):
            db.execute("INSERT OR REPLACE INTO engines VALUES (?, ?)", (engine_id, model))
        case EngineForgotten(engine_id):
            db.execute("DELETE FROM engines WHERE engine_id = ?", (engine_id,))
        case UpdateBegan():
            _write_began(db, record)
        case UpdateWentGo(update_id):
            db.execute("UPDATE updates SET phase = 'go' WHERE update_id = ?", (update_id,))
        case UpdateRolled():
            db.execute("UPDATE updates SET rolled = 1 WHERE update_id = ?", (record.update_id,))
            _write_served(db, record)
        case UpdateDecided():
            db.execute(
                "UPDATE updates SET phase = ?, cause = ? WHERE update_id = ?",
                (record.phase.value, record.cause, record.update_id),
            )
            _write_served(db, record)


def _write_began(db: sqlite3.Connection, record: UpdateBegan) -> None:
    db.execute(
        "INSERT INTO updates (number, update_id, request_id, model, term, step, phase) "
        "VALUES (?, ?, ?, ?, ?, ?, 'preparing')",
        (
            record.version.number,
            record.update_id,
            record.request_id,
            record.model,
            record.version.term,
            record.step,
        ),
    )
    db.executemany(
        "INSERT INTO update_engines VALUES (?, ?, ?, ?)",
        [(record.update_id, i, inc, int(required)) for i, inc, required, _, _ in record.engines],
    )


def _write_served(db: sqlite3.Connection, record: UpdateRolled | UpdateDecided) -> None:
    db.execute("INSERT OR REPLACE INTO models VALUES (?, ?)", (record.model, record.ordinal))
    db.execute("DELETE FROM served WHERE model = ?", (record.model,))
    db.executemany("INSERT INTO served VALUES (?, ?, ?)", [(record.model, v.term, v.number) for v in record.served])


def _models(db: sqlite3.Connection, leases: list[TermGiven]) -> dict[ModelName, ModelRecord]:
    models = {lease.model: ModelRecord(term=lease.term) for lease in leases}
    for name, ordinal in db.execute("SELECT model, ordinal FROM models"):
        models.setdefault(ModelName(name), ModelRecord()).ordinal = ordinal
    for name, term, number in db.execute("SELECT model, term, number FROM served ORDER BY number"):
        record = models.setdefault(ModelName(name), ModelRecord())
        record.served = (*record.served, WeightVersion(number, Term(term)))
    return models


def _open_updates(db: sqlite3.Connection) -> Iterator[tuple[UpdateBegan, bool]]:
    rows = db.execute(
        "SELECT update_id, request_id, model, term, number, step, phase FROM updates "
        "WHERE phase IN ('preparing', 'go') ORDER BY number"
    ).fetchall()
    for update_id, request_id, model, term, number, step, phase in rows:
        engines = db.execute(
            "SELECT engine_id, incarnation, required FROM update_engines WHERE update_id = ? ORDER BY engine_id",
            (update_id,),
        ).fetchall()
        began = UpdateBegan(
            UpdateId(update_id),
            request_id,
            ModelName(model),
            WeightVersion(number, Term(term)),
            step,
            tuple(EngineAsked(EngineId(i), Incarnation(inc), bool(required)) for i, inc, required in engines),
        )
        yield began, phase == "go"


def _rolled(db: sqlite3.Connection) -> frozenset[UpdateId]:
    rows = db.execute("SELECT update_id FROM updates WHERE rolled = 1 AND phase = 'go'")
    return frozenset(UpdateId(update_id) for (update_id,) in rows)


def _meta(db: sqlite3.Connection, key: str) -> str:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    if row is None:
        raise LedgerError(path="", cause=f"it has no {key}")
    return str(row[0])


def _statements(script: str) -> list[str]:
    lines = [line for line in script.splitlines() if not line.startswith("--")]
    return [s.strip() for s in "\n".join(lines).split(";") if s.strip()]

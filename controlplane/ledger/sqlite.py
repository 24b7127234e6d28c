"""The ledger in SQLite: write-ahead log, synchronous=FULL, strict tables, one transaction a record.

A commit costs one fsync (measured: 0.65 ms); NORMAL would be 30 times faster and lose the tail when the power fails.
The file is locked for the life of the coordinator, so a second one on the same directory is told so. An older file is
brought to this schema in the transaction that gives the new life its term.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.core.errors import LedgerError
from controlplane.core.fleet_records import Record, Recovered
from controlplane.core.versions import RunId
from controlplane.ledger import schema
from controlplane.ledger.reading import coordinator_term, owner, recover
from controlplane.ledger.writing import set_coordinator_term, write


class SqliteLedger:
    """A ledger file. Use from one thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix seconds; what is remembered for a time is remembered over restarts."""
        self._path = path
        self._clock = clock
        self._db: sqlite3.Connection | None = None

    def open(self, run_id: RunId) -> Recovered:
        try:
            with self._errors():
                db = self._db = self._connect()
                version = schema.version_of(db)
                db.execute("PRAGMA locking_mode=EXCLUSIVE")
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=FULL")
                self._begin_life(run_id, version)
                return recover(db, self._clock())
        except LedgerError:
            self.close()
            raise

    def save(self, record: Record) -> None:
        with self._transaction() as db:
            write(db, record, self._clock())

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # No wait for a lock: whoever holds it is another coordinator.
        return sqlite3.connect(self._path, isolation_level=None, timeout=0, check_same_thread=False)

    def _begin_life(self, run_id: RunId, version: int) -> None:
        """Create or migrate the tables if need be, check the run, and take the next term: durable when this returns."""
        with self._transaction() as db:
            if version == 0:
                schema.create(db)
                db.execute("INSERT INTO meta (key, value) VALUES ('run_id', ?), ('coordinator_term', '0')", (run_id,))
            else:
                schema.migrate(db, version)
            if owner(db) != run_id:
                raise LedgerError(path=str(self._path), cause=f"it belongs to run {owner(db)}, not {run_id}")
            set_coordinator_term(db, coordinator_term(db) + 1)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._db
        if db is None:
            raise LedgerError(path=str(self._path), cause="it is not open")
        with self._errors():
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # a full disk may have ended it already
                    db.execute("ROLLBACK")
                raise

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

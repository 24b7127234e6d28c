"""Reading a ledger while no coordinator has it open: everything it holds, and whether that can be true."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controlplane.core.errors import LedgerError
from controlplane.ledger.contradictions import contradictions
from controlplane.ledger.schema import SCHEMA_VERSION, version_of

TABLES = (
    "meta",
    "leases",
    "models",
    "served",
    "engines",
    "layouts",
    "updates",
    "update_engines",
    "checkpoints",
    "floors",
    "floor_terms",
    "kept_engines",
)

STEPS_BETWEEN = 100_000
"""Of SQLite's machine, between two words about where a check is."""


def dump(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table; digests in hexadecimal.

    Raises:
        LedgerError: there is no such file, it is another program's, damaged, of another schema, or a coordinator has
            it open.
    """
    with _opened(path) as db:
        return _rows(db)


def verify(path: Path, told: Callable[[str], None] = lambda part: None) -> list[str]:
    """What cannot be true of a ledger that only coordinators wrote; empty if all is well.

    `told` hears what is looked at, again and again.

    Raises:
        LedgerError: as `dump`.
    """
    with _opened(path) as db:
        db.set_progress_handler(lambda: told("its pages"), STEPS_BETWEEN)
        damage = [str(row[0]) for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        db.set_progress_handler(lambda: told("its rows"), STEPS_BETWEEN)
        return damage or contradictions(_rows(db))


def _rows(db: sqlite3.Connection) -> dict[str, list[dict[str, Any]]]:
    return {table: [_shown(row) for row in db.execute(f"SELECT * FROM {table} ORDER BY 1, 2")] for table in TABLES}


def _shown(row: sqlite3.Row) -> dict[str, Any]:
    named = zip(row.keys(), row, strict=True)
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in named}


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    db = None
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=0)
        db.row_factory = sqlite3.Row
        _check_version(version_of(db))
        yield db
    except sqlite3.Error as error:
        cause = "a coordinator has it open" if "locked" in str(error) else str(error)
        raise LedgerError(path=str(path), cause=cause) from error
    finally:
        if db is not None:
            db.close()


def _check_version(version: int) -> None:
    if version == 0:
        raise sqlite3.DatabaseError("it is empty")
    if version < SCHEMA_VERSION:
        raise sqlite3.DatabaseError(
            f"its schema is version {version}, and this program reads {SCHEMA_VERSION}: "
            "a coordinator of this program's version migrates it when it starts"
        )

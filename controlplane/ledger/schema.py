"""The file's format: which files are ours, how a new one is made, and how an older one is brought to this schema.

A file is made or migrated inside the caller's transaction: it has the new schema whole, or is as it was.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from importlib.resources import files

APPLICATION_ID = 0x57504C31
"""Marks the file as ours: "WPL1"."""
SCHEMA_VERSION = 3
MIGRATIONS = {1: "1_to_2.sql", 2: "2_to_3.sql"}
"""By the version that each script starts from; it ends at the next. A script that was released is never changed."""


def version_of(db: sqlite3.Connection) -> int:
    """The schema's version of a ledger; 0 of an empty file.

    Raises:
        sqlite3.DatabaseError: it is no database, or no ledger.
    """
    application = db.execute("PRAGMA application_id").fetchone()[0]
    empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if application != APPLICATION_ID and not (application == 0 and empty):
        raise sqlite3.DatabaseError("it is a database of another program")
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"its schema is version {version}, this program knows {SCHEMA_VERSION}")
    return version


def create(db: sqlite3.Connection) -> None:
    """Make the tables of an empty file. Inside a transaction."""
    _run(db, "schema.sql")
    db.execute(f"PRAGMA application_id={APPLICATION_ID}")
    db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def migrate(db: sqlite3.Connection, version: int) -> None:
    """Bring a ledger of this version, and all its rows, to SCHEMA_VERSION. Inside a transaction."""
    for step in range(version, SCHEMA_VERSION):
        _run(db, "migrations", MIGRATIONS[step])
    db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _run(db: sqlite3.Connection, *name: str) -> None:
    """`executescript` would commit the transaction that this is a part of."""
    for statement in _statements(files(__package__).joinpath(*name).read_text()):
        db.execute(statement)


def _statements(script: str) -> Iterator[str]:
    lines: list[str] = []
    for line in script.splitlines(keepends=True):
        lines.append(line)
        if sqlite3.complete_statement("".join(lines)):
            yield "".join(lines)
            lines.clear()
    yield "".join(lines)

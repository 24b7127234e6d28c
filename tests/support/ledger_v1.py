"""A ledger file of schema 1, to be migrated."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("ledger_v1.sql")
TABLES = ("meta", "leases", "models", "served", "engines", "updates", "update_engines")


def make(path: Path, more: str = "") -> dict[str, list[dict[str, Any]]]:
    """Write it, with `more` statements in it, and return its rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode=WAL")
    db.executescript(SCRIPT.read_text() + more)
    db.close()
    return rows(path)


def rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Those of schema 1's tables, with all columns that the file has now."""
    db = sqlite3.connect(path)
    db.row_factory = sqlite3.Row
    found = {table: [dict(row) for row in db.execute(f"SELECT * FROM {table} ORDER BY rowid")] for table in TABLES}
    db.close()
    return found


def version(path: Path) -> int:
    db = sqlite3.connect(path)
    found = int(db.execute("PRAGMA user_version").fetchone()[0])
    db.close()
    return found

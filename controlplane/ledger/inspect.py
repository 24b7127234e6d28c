"""Reading a ledger while no coordinator has it open: everything it holds, and whether that can be true."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from controlplane.core.errors import LedgerError
from controlplane.ledger.sqlite import APPLICATION_ID, SCHEMA_VERSION

TABLES = ("meta", "leases", "models", "served", "engines", "updates", "update_engines")
_SERVED_PHASES = ("committed", "degraded")


def dump(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table.

    Raises:
        LedgerError: there is no such file, it is another program's, damaged, or a coordinator has it open.
    """
    db = _open(path)
    try:
        return {table: [dict(row) for row in db.execute(f"SELECT * FROM {table} ORDER BY 1")] for table in TABLES}
    except sqlite3.Error as error:
        raise LedgerError(path=str(path), cause=_cause(error)) from error
    finally:
        db.close()


def verify(path: Path) -> list[str]:
    """What cannot be true of a ledger that only coordinators wrote; empty if all is well.

    Raises:
        LedgerError: as `dump`.
    """
    db = _open(path)
    try:
        damage = [str(row[0]) for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
    except sqlite3.Error as error:
        raise LedgerError(path=str(path), cause=_cause(error)) from error
    finally:
        db.close()
    return damage or _contradictions(dump(path))


def _contradictions(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    updates = {u["number"]: u for u in rows["updates"]}
    terms = {lease["model"]: lease["term"] for lease in rows["leases"]}
    found = [
        f"{served['model']}: number {served['number']} is served, but no update committed it"
        for served in rows["served"]
        if not _was_committed(updates.get(served["number"]))
    ]
    found += [
        f"update {update['update_id']}: its term {update['term']} was never given"
        for update in updates.values()
        if update["term"] > terms.get(update["model"], 0)
    ]
    for model in rows["models"]:
        commits = sum(u["phase"] in _SERVED_PHASES for u in updates.values() if u["model"] == model["model"])
        if model["ordinal"] < commits:
            found.append(f"{model['model']}: ordinal {model['ordinal']} after {commits} commits")
    for name in {u["model"] for u in updates.values()}:
        still_open = [u["update_id"] for u in updates.values() if u["model"] == name and _is_open(u)]
        if len(still_open) > 1:
            found.append(f"{name}: {len(still_open)} updates are open at once")
    return found


def _was_committed(update: dict[str, Any] | None) -> bool:
    return update is not None and (update["phase"] in _SERVED_PHASES or bool(update["rolled"]))


def _is_open(update: dict[str, Any]) -> bool:
    return update["phase"] in ("preparing", "go")


def _open(path: Path) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=0)
        db.row_factory = sqlite3.Row
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.Error as error:
        raise LedgerError(path=str(path), cause=_cause(error)) from error
    if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
        db.close()
        raise LedgerError(path=str(path), cause=f"it is no ledger of schema {SCHEMA_VERSION}")
    return db


def _cause(error: sqlite3.Error) -> str:
    return "a coordinator has it open" if "locked" in str(error) else str(error)

"""The ledger's file: which one is taken, how an older one is migrated, what lies in it, and how it is read."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.engine_state import Stage
from controlplane.core.errors import LedgerError
from controlplane.core.fleet_records import (
    EngineAsked,
    EngineKept,
    EngineKnown,
    FloorRaised,
    RequestKnown,
    TermGiven,
    UpdateBegan,
    UpdateDecided,
    UpdateWentGo,
)
from controlplane.core.update_outcomes import Outcome
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, TrainerId, UpdateId, WeightVersion
from controlplane.ledger import SqliteLedger
from controlplane.ledger.inspect import dump, verify
from controlplane.ledger.reading import recover
from controlplane.ledger.schema import MIGRATIONS, SCHEMA_VERSION
from tests.support import ledger_v1

RUN = RunId("run")
POLICY = ModelName("policy")
CRITIC = ModelName("critic")
NOW = 1_800_000_000.0
LAYOUT, CONTENT = b"L" * 32, b"C" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def life(path: Path, *records: Any) -> None:
    ledger = SqliteLedger(path, lambda: NOW)
    ledger.open(RUN)
    for record in records:
        ledger.save(record)
    ledger.close()


# ---- which file ----


def test_a_second_coordinator_on_the_same_file_is_told_so(path: Path) -> None:
    first = SqliteLedger(path)
    first.open(RUN)
    with pytest.raises(LedgerError, match="another coordinator"):
        SqliteLedger(path).open(RUN)
    first.close()


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to look like one" * 20, None])
def test_a_corrupt_or_foreign_file_is_refused_and_left_as_it_is(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    else:
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE somebody_elses (x)")
        db.commit()
        db.close()
    before = path.read_bytes()
    with pytest.raises(LedgerError):
        SqliteLedger(path).open(RUN)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused_with_both_versions(path: Path) -> None:
    life(path)
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 7")
    db.close()
    for read in (SqliteLedger(path).open, lambda _: verify(path)):
        with pytest.raises(LedgerError, match=f"its schema is version 7, this program knows {SCHEMA_VERSION}"):
            read(RUN)


def test_a_ledger_that_was_refused_is_free_again(path: Path) -> None:
    life(path)
    refused = SqliteLedger(path)
    with pytest.raises(LedgerError, match="belongs to run"):
        refused.open(RunId("other"))
    life(path)


# ---- older files ----


def tables(path: Path) -> dict[str, set[tuple[Any, ...]]]:
    """Columns and indices of each table, whatever their order and wording."""
    db = sqlite3.connect(path)
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {
        name: {column[1:] for column in db.execute(f"PRAGMA table_xinfo({name})")}
        | {index[1:] for index in db.execute(f"PRAGMA index_list({name})")}
        | {("strict", strict) for (strict,) in db.execute("SELECT strict FROM pragma_table_list(?)", (name,))}
        for name in names
    }
    db.close()
    return found


def test_a_fresh_file_has_the_newest_schema_and_a_migrated_one_the_same(tmp_path: Path) -> None:
    fresh, old = tmp_path / "fresh.sqlite", tmp_path / "old.sqlite"
    life(fresh)
    ledger_v1.make(old)
    life(old)
    assert ledger_v1.version(fresh) == ledger_v1.version(old) == SCHEMA_VERSION
    assert tables(fresh) == tables(old)
    assert [*MIGRATIONS] == [*range(1, SCHEMA_VERSION)]


def test_a_file_of_schema_1_keeps_all_it_had(path: Path) -> None:
    before = ledger_v1.make(path)
    life(path)
    after = ledger_v1.rows(path)
    assert [m for m in after["meta"] if m["key"] == "coordinator_term"] == [{"key": "coordinator_term", "value": "5"}]
    for table in [t for t in ledger_v1.TABLES if t != "meta"]:
        assert [{key: row[key] for key in before[table][0]} for row in after[table]] == before[table]
    assert verify(path) == []


def test_a_file_of_schema_1_is_recovered_as_it_was_and_written_to(path: Path) -> None:
    ledger_v1.make(path)
    ledger = SqliteLedger(path, lambda: NOW)
    found = ledger.open(RUN)
    assert (found.coordinator_term, found.next_number) == (5, 5)
    assert found.leases == (
        TermGiven(CRITIC, Term(1), TrainerId("t1"), Incarnation("t1-life")),
        TermGiven(POLICY, Term(3), TrainerId("t0"), Incarnation("t0-life")),
    )
    assert found.engines == tuple(
        EngineKnown(EngineId(i), m) for i, m in (("e0", POLICY), ("e1", POLICY), ("e2", CRITIC))
    )
    policy = found.models[POLICY]
    assert (policy.served, policy.ordinal) == ((WeightVersion(1, Term(2)), WeightVersion(4, Term(3))), 2)
    assert (policy.digests, policy.checkpoints) == ({}, {})
    asked = (
        EngineAsked(EngineId("e1"), Incarnation("i1"), True),
        EngineAsked(EngineId("e0"), Incarnation("i0"), False),
    )
    began = UpdateBegan(UpdateId("u4"), "r4", POLICY, WeightVersion(4, Term(3)), 11, asked)
    assert found.open_updates == ((began, True),)
    assert found.rolled == {UpdateId("u4")}
    assert found.requests == ()  # schema 1 kept no times
    ledger.save(UpdateDecided(UpdateId("u4"), POLICY, Phase.COMMITTED, "", (began.version,), 2, CONTENT))
    ledger.save(UpdateBegan(UpdateId("u5"), "r5", POLICY, WeightVersion(5, Term(3)), 12, asked, LAYOUT, 8))
    ledger.close()
    again = SqliteLedger(path, lambda: NOW + 1.0)
    found = again.open(RUN)
    again.close()
    assert found.models[POLICY].digests == {began.version: CONTENT}
    assert found.requests == (RequestKnown("r5", UpdateId("u5"), POLICY, WeightVersion(5, Term(3)), LAYOUT, 1.0),)


def test_a_file_of_schema_2_keeps_all_it_had_and_can_keep_engines(path: Path) -> None:
    known = EngineKnown(EngineId("e0"), POLICY)
    life(path, known)
    db = sqlite3.connect(path)
    db.executescript("DROP TABLE kept_engines; PRAGMA user_version = 2;")  # all that schema 3 added
    db.close()
    kept = EngineKept(EngineId("e0"), POLICY, WeightVersion(1, Term(1)), CONTENT)
    life(path, kept)
    ledger = SqliteLedger(path, lambda: NOW)
    found = ledger.open(RUN)
    ledger.close()
    assert (found.engines, found.kept) == ((known,), (kept,))
    assert ledger_v1.version(path) == SCHEMA_VERSION


def test_a_migration_that_fails_leaves_the_file_as_it_was_and_can_be_done_later(path: Path) -> None:
    before = ledger_v1.make(path, "CREATE TABLE checkpoints (in_the_way);")  # after half of the script
    with pytest.raises(LedgerError, match="checkpoints already exists"):
        SqliteLedger(path).open(RUN)
    assert (ledger_v1.version(path), ledger_v1.rows(path)) == (1, before)
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.execute("DROP TABLE checkpoints")
    db.close()
    life(path)
    assert ledger_v1.version(path) == SCHEMA_VERSION


def test_another_runs_file_of_schema_1_is_not_migrated(path: Path) -> None:
    before = ledger_v1.make(path)
    with pytest.raises(LedgerError, match="belongs to run"):
        SqliteLedger(path).open(RunId("other"))
    assert (ledger_v1.version(path), ledger_v1.rows(path)) == (1, before)


# ---- what lies in it ----


def test_everything_that_an_update_told_is_in_its_rows(path: Path) -> None:
    asked = EngineAsked(EngineId("e0"), Incarnation("i0"), True, "rollout", "pd0")
    outcomes = (
        Outcome(
            EngineId("e0"), Incarnation("i0"), True, Stage.APPLIED, group="rollout", unit="pd0", content_digest=CONTENT
        ),
        Outcome(EngineId("e1"), Incarnation("i1"), False, None, True, "PEER_LOST", "silent", "rollout", "", True),
    )
    version = WeightVersion(9, Term(2))
    life(
        path,
        UpdateBegan(UpdateId("u"), "r", POLICY, version, 7, (asked,), LAYOUT, 4096, WeightVersion(5, Term(1))),
        UpdateDecided(UpdateId("u"), POLICY, Phase.DEGRADED, "e1 lost", (version,), 3, CONTENT, outcomes),
    )
    rows = dump(path)
    assert rows["updates"] == [
        {"number": 9, "update_id": "u", "request_id": "r", "model": "policy", "term": 2, "step": 7}
        | {"phase": "degraded", "rolled": 0, "cause": "e1 lost", "began_at": NOW, "decided_at": NOW}
        | {"layout_digest": LAYOUT.hex(), "content_digest": CONTENT.hex(), "byte_count": 4096}
        | {"restores_term": 1, "restores_number": 5}
    ]
    common = {"update_id": "u", "grp": "rollout"}
    assert rows["update_engines"] == [
        common
        | {"engine_id": "e0", "incarnation": "i0", "required": 1, "unit": "pd0", "awaited": 0, "stage": "applied"}
        | {"lost": 0, "error_reason": "", "error_message": "", "content_digest": CONTENT.hex()},
        common
        | {"engine_id": "e1", "incarnation": "i1", "required": 0, "unit": "", "awaited": 1, "stage": None}
        | {"lost": 1, "error_reason": "PEER_LOST", "error_message": "silent", "content_digest": ""},
    ]
    assert rows["layouts"] == [{"digest": LAYOUT.hex(), "byte_count": 4096, "first_seen_at": NOW}]


def test_a_layouts_bytes_are_those_of_a_full_update(path: Path) -> None:
    def began(number: int, byte_count: int) -> UpdateBegan:
        return UpdateBegan(
            UpdateId(f"u{number}"), "r", POLICY, WeightVersion(number, Term(1)), 1, (), LAYOUT, byte_count
        )

    life(path, began(1, 500), began(2, 4096), began(3, 600))
    assert [layout["byte_count"] for layout in dump(path)["layouts"]] == [4096]


def test_who_accepted_an_older_copy_and_when_is_kept(path: Path) -> None:
    life(
        path,
        UpdateBegan(UpdateId("u"), "r", POLICY, WeightVersion(6, Term(1)), None, ()),
        FloorRaised(40, Term(17), ((POLICY, Term(5)),), "ada"),
    )
    rows = dump(path)
    accepted = {"accepted_by": "ada", "accepted_at": NOW}
    assert rows["floors"] == [{"id": 1, "number": 40, "known_number": 6, "coordinator_term": 17} | accepted]
    assert rows["floor_terms"] == [{"floor_id": 1, "model": "policy", "term": 5}]


# ---- how it is read ----


def test_an_opening_reads_no_update_that_is_neither_open_nor_remembered(path: Path) -> None:
    """Updates are kept for ever: each statement finds its rows of them by an index."""
    asked = (EngineAsked(EngineId("e0"), Incarnation("i0"), True),)
    began = UpdateBegan(UpdateId("u"), "r", POLICY, WeightVersion(1, Term(1)), 1, asked, LAYOUT)
    life(path, began, UpdateWentGo(UpdateId("u")))
    db = sqlite3.connect(path)
    asked_for: list[str] = []
    db.set_trace_callback(asked_for.append)
    assert recover(db, NOW).open_updates == ((began, True),)
    db.set_trace_callback(None)
    plans = {s: [str(step[-1]) for step in db.execute(f"EXPLAIN QUERY PLAN {s}")] for s in asked_for}
    db.close()
    of_updates = {s: plan for s, plan in plans.items() if re.search(r"FROM update", s)}
    assert len(of_updates) == 4
    assert not [s for s, plan in of_updates.items() if any(step.startswith("SCAN") for step in plan)]

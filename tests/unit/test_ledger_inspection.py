"""`weightplane ledger`: what a ledger holds, and what cannot be true of it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from controlplane.cli.main import app
from controlplane.core.engine_state import Stage
from controlplane.core.fleet_records import (
    CheckpointKept,
    EngineAsked,
    FloorRaised,
    FrozenServed,
    TermGiven,
    UpdateBegan,
    UpdateDecided,
    UpdateRolled,
    UpdateWentGo,
)
from controlplane.core.update_outcomes import Outcome
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import (
    NO_TERM,
    EngineId,
    Incarnation,
    ModelName,
    RunId,
    Term,
    TrainerId,
    UpdateId,
    WeightVersion,
)
from controlplane.exit_codes import ExitCode
from controlplane.ledger import SqliteLedger, inspect
from tests.support import ledger_v1

POLICY, TEACHER = ModelName("policy"), ModelName("teacher")
FIRST, SECOND, ABORTED, LOST, THIRD = (WeightVersion(n, Term(t)) for n, t in ((1, 1), (2, 1), (3, 1), (30, 2), (41, 5)))
LAYOUT, OLD, NEW = b"L" * 32, b"1" * 32, b"2" * 32
NOW = 1_800_000_000.0


E0, E1 = EngineId("e0"), EngineId("e1")
ASKED = (EngineAsked(E0, Incarnation("i0"), True), EngineAsked(E1, Incarnation("i1"), True))


def began(version: WeightVersion, restores: WeightVersion | None = None) -> UpdateBegan:
    update_id = UpdateId(f"u{version.number}")
    return UpdateBegan(update_id, "r", POLICY, version, 1, ASKED, LAYOUT, 4096, restores)


def decided(version: WeightVersion, phase: Phase, ordinal: int, content: bytes, *outcomes: Outcome) -> UpdateDecided:
    return UpdateDecided(UpdateId(f"u{version.number}"), POLICY, phase, "", (version,), ordinal, content, outcomes)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """Of policy a commit, one that rolled and degraded, an abort, an older copy that was accepted, and a rollback; a
    frozen teacher."""
    ledger = SqliteLedger(tmp_path / "ledger.sqlite", lambda: NOW)
    ledger.open(RunId("run"))
    applied = Outcome(E0, Incarnation("i0"), True, Stage.APPLIED, content_digest=OLD)
    lost = Outcome(E1, Incarnation("i1"), True, Stage.INSTALLING, lost=True, error_reason="PEER_LOST")
    for record in (
        TermGiven(POLICY, Term(1), TrainerId("t"), Incarnation("i")),
        began(FIRST),
        UpdateWentGo(UpdateId("u1")),
        decided(FIRST, Phase.COMMITTED, 1, OLD, applied, lost),
        CheckpointKept(POLICY, FIRST, "policy/1", LAYOUT, OLD, 290, 4, 4096),
        began(SECOND),
        UpdateWentGo(UpdateId("u2")),
        UpdateRolled(UpdateId("u2"), POLICY, (FIRST, SECOND), 2, NEW),
        decided(SECOND, Phase.DEGRADED, 2, NEW, lost),
        began(ABORTED),
        UpdateDecided(UpdateId("u3"), POLICY, Phase.FAILED, "e1 lost", (SECOND,), 2, b"", (lost,)),
        FrozenServed(TEACHER, NEW),
        CheckpointKept(TEACHER, WeightVersion(0, NO_TERM), "teacher/0", LAYOUT, NEW, 290, 4, 4096),
        FloorRaised(40, Term(9), ((POLICY, Term(4)),), "ada"),
        CheckpointKept(POLICY, LOST, "policy/30", LAYOUT, OLD, 290, 4, 4096),
        TermGiven(POLICY, Term(5), TrainerId("t"), Incarnation("i")),
        began(THIRD, restores=FIRST),
        UpdateWentGo(UpdateId("u41")),
        decided(THIRD, Phase.COMMITTED, 3, OLD, applied),
    ):
        ledger.save(record)
    ledger.close()
    return tmp_path


def ask(state_dir: Path, command: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ledger", command, "--state-dir", str(state_dir)])
    return result.exit_code, result.output


def test_a_ledger_that_only_coordinators_wrote_is_whole(state_dir: Path) -> None:
    assert ask(state_dir, "verify") == (ExitCode.OK, "the ledger is whole\n")


def test_a_check_tells_where_it_is(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "STEPS_BETWEEN", 10)
    told: list[str] = []
    assert inspect.verify(state_dir / "ledger.sqlite", told.append) == []
    assert set(told) == {"its pages", "its rows"}


def test_a_dump_has_every_row(state_dir: Path) -> None:
    code, text = ask(state_dir, "dump")
    rows = json.loads(text)
    assert code == ExitCode.OK
    assert rows["served"] == [
        {"model": "policy", "term": 5, "number": 41, "content_digest": OLD.hex()},
        {"model": "teacher", "term": 0, "number": 0, "content_digest": NEW.hex()},
    ]
    assert [u["phase"] for u in rows["updates"]] == ["committed", "degraded", "failed", "committed"]
    assert [c["name"] for c in rows["checkpoints"]] == ["policy/1", "policy/30", "teacher/0"]
    db = sqlite3.connect(state_dir / "ledger.sqlite")
    for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        assert len(rows[table]) == db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    db.close()


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("UPDATE served SET number = 3 WHERE number = 41", "policy: number 3 is served, but no update committed it"),
        (
            "UPDATE updates SET phase = 'failed' WHERE number = 41",
            "policy: number 41 is served, but no update committed it",
        ),
        (
            "UPDATE served SET content_digest = x'33' WHERE number = 41",
            "policy: number 41 is served with other contents than its update's",
        ),
        (
            "INSERT INTO leases VALUES ('teacher', 1, 't', 'i')",
            "teacher: it is served as it was loaded, though it has a trainer",
        ),
        (
            "INSERT INTO kept_engines VALUES ('e0', 'policy', 1, 3, x'', 0.0)",
            "e0: it stays at number 3, but no update committed it",
        ),
        (
            "INSERT INTO kept_engines VALUES ('e0', 'policy', 5, 41, x'33', 0.0)",
            "e0: it stays at number 41 with other contents than its update's",
        ),
        ("DELETE FROM leases", "update u41: its term 5 was never given"),
        ("UPDATE updates SET term = 6 WHERE number = 1", "update u1: its term 6 was never given"),
        ("UPDATE models SET ordinal = 1 WHERE model = 'policy'", "policy: ordinal 1 after 3 commits"),
        ("UPDATE updates SET phase = 'go'", "policy: 4 updates are open at once"),
        (
            "UPDATE update_engines SET stage = 'failed'",
            "update u41: it is committed, but none of its 1 engines applied it",
        ),
        (
            "UPDATE update_engines SET lost = 1",
            "update u1: it is committed, but none of its 2 engines applied it",
        ),
        (
            "UPDATE updates SET rolled = 0",
            "update u2: it is degraded, but none of its 1 engines applied it",
        ),
        (
            "UPDATE updates SET phase = 'failed' WHERE number = 2",
            "update u2: it failed, but the fleet served it already",
        ),
        ("UPDATE updates SET phase = 'go' WHERE number = 41", "update u41: it has outcomes, but no decision"),
        (
            "UPDATE update_engines SET content_digest = x'33' WHERE update_id = 'u1'",
            "update u1: e0 applied other contents than the update's",
        ),
        (
            "UPDATE updates SET restores_number = 41 WHERE number = 41",
            "update u41: number 41 restores 41, which came later",
        ),
        (
            "UPDATE updates SET restores_number = 3 WHERE number = 41",
            "update u41: it restores number 3, but no update committed it",
        ),
        (
            "UPDATE updates SET restores_number = 2 WHERE number = 41",
            "update u41: its contents are not those of number 2, which it restores",
        ),
        ("DELETE FROM layouts", "update u1: its layout was never seen"),
        (
            "UPDATE checkpoints SET number = 3, term = 1 WHERE number = 1",
            "checkpoint policy/1 of policy: no update committed number 3",
        ),
        (
            "UPDATE checkpoints SET term = 2 WHERE number = 1",
            "checkpoint policy/1 of policy: number 1 is version 1.1 of policy",
        ),
        (
            "UPDATE checkpoints SET content_digest = x'33' WHERE number = 1",
            "checkpoint policy/1 of policy: its contents are not those of number 1",
        ),
        (
            "UPDATE checkpoints SET layout_digest = x'33' WHERE number = 1",
            "checkpoint policy/1 of policy: its layout is not that of number 1",
        ),
        (
            "UPDATE meta SET value = 8 WHERE key = 'coordinator_term'",
            "coordinator term 8 is below the accepted floor 9",
        ),
        (
            "UPDATE updates SET number = 40 WHERE number = 41",
            "number 40 was given, though it is not above the accepted floor 40",
        ),
        ("UPDATE updates SET term = 3 WHERE number = 41", "update u41: its term 3 is below the accepted floor"),
    ],
)
def test_a_contradiction_is_named_and_is_an_exit_code(state_dir: Path, statement: str, complaint: str) -> None:
    db = sqlite3.connect(state_dir / "ledger.sqlite")
    assert db.execute(statement).rowcount > 0
    db.commit()
    db.close()
    code, text = ask(state_dir, "verify")
    assert code == ExitCode.FAILED
    assert complaint in text.splitlines()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE update_engines SET lost = NULL, stage = NULL, content_digest = x''",
        "UPDATE updates SET content_digest = x'', layout_digest = x''",
        "UPDATE served SET content_digest = x''",
        "UPDATE updates SET began_at = NULL, decided_at = NULL",
    ],
)
def test_what_was_never_told_contradicts_nothing(state_dir: Path, statement: str) -> None:
    db = sqlite3.connect(state_dir / "ledger.sqlite")
    db.execute(statement)
    db.commit()
    db.close()
    assert ask(state_dir, "verify") == (ExitCode.OK, "the ledger is whole\n")


def test_a_ledger_that_a_coordinator_has_open_is_left_alone(state_dir: Path) -> None:
    ledger = SqliteLedger(state_dir / "ledger.sqlite")
    ledger.open(RunId("run"))
    code, text = ask(state_dir, "verify")
    ledger.close()
    assert (code, "a coordinator has it open" in text) == (ExitCode.LEDGER, True)


def test_a_file_that_is_no_ledger_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    assert ask(tmp_path, "dump")[0] == ExitCode.LEDGER
    (tmp_path / "ledger.sqlite").write_bytes(b"x" * 5000)
    assert ask(tmp_path, "verify")[0] == ExitCode.LEDGER
    (tmp_path / "ledger.sqlite").write_bytes(b"")
    assert ask(tmp_path, "verify")[0] == ExitCode.LEDGER


@pytest.mark.parametrize("command", ["verify", "dump"])
def test_an_older_ledger_is_left_as_it_is_for_a_coordinator_to_migrate(tmp_path: Path, command: str) -> None:
    before = ledger_v1.make(tmp_path / "ledger.sqlite")
    code, text = ask(tmp_path, command)
    assert code == ExitCode.LEDGER
    assert "its schema is version 1, and this program reads 3: a coordinator of this program's version migrates it" in (
        " ".join(text.split())
    )
    assert ledger_v1.rows(tmp_path / "ledger.sqlite") == before

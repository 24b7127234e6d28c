"""`weightplane ledger`: what a ledger holds, and what cannot be true of it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from controlplane.cli.main import app
from controlplane.core.fleet_records import TermGiven, UpdateBegan, UpdateDecided, UpdateWentGo
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import Incarnation, ModelName, RunId, Term, TrainerId, UpdateId, WeightVersion
from controlplane.exit_codes import ExitCode
from controlplane.ledger import SqliteLedger

POLICY = ModelName("policy")


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """A ledger with one committed update."""
    ledger = SqliteLedger(tmp_path / "ledger.sqlite")
    ledger.open(RunId("run"))
    ledger.save(TermGiven(POLICY, Term(1), TrainerId("t"), Incarnation("i")))
    version = WeightVersion(1, Term(1))
    ledger.save(UpdateBegan(UpdateId("u"), "r", POLICY, version, 1, ()))
    ledger.save(UpdateWentGo(UpdateId("u")))
    ledger.save(UpdateDecided(UpdateId("u"), POLICY, Phase.COMMITTED, "", (version,), 1))
    ledger.close()
    return tmp_path


def ask(state_dir: Path, command: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ledger", command, "--state-dir", str(state_dir)])
    return result.exit_code, result.output


def test_a_ledger_that_only_coordinators_wrote_is_whole(state_dir: Path) -> None:
    assert ask(state_dir, "verify") == (ExitCode.OK, "the ledger is whole\n")


def test_a_dump_has_every_row(state_dir: Path) -> None:
    code, text = ask(state_dir, "dump")
    rows = json.loads(text)
    assert code == ExitCode.OK
    assert rows["served"] == [{"model": "policy", "term": 1, "number": 1}]
    assert rows["updates"][0]["phase"] == "committed"


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("UPDATE served SET number = 7", "number 7 is served, but no update committed it"),
        ("UPDATE updates SET phase = 'failed'", "number 1 is served, but no update committed it"),
        ("DELETE FROM leases", "its term 1 was never given"),
        ("UPDATE models SET ordinal = 0", "ordinal 0 after 1 commits"),
    ],
)
def test_a_contradiction_is_named_and_is_an_exit_code(state_dir: Path, statement: str, complaint: str) -> None:
    db = sqlite3.connect(state_dir / "ledger.sqlite")
    db.execute(statement)
    db.commit()
    db.close()
    code, text = ask(state_dir, "verify")
    assert code == ExitCode.FAILED
    assert complaint in text


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

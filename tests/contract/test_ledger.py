"""One suite for every ledger: what is saved is there after a reopen, and numbers and terms only grow."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.core.errors import LedgerError
from controlplane.core.fleet_records import (
    EngineAsked,
    EngineForgotten,
    EngineKnown,
    TermGiven,
    UpdateBegan,
    UpdateDecided,
    UpdateRolled,
    UpdateWentGo,
)
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, TrainerId, UpdateId, WeightVersion
from controlplane.ledger import Ledger, MemoryLedger, SqliteLedger

RUN = RunId("run")
POLICY = ModelName("policy")
Reopen = Callable[[], Ledger]


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Reopen:
    """Returns a function that gives the same ledger again, as a restarted coordinator would find it."""
    memory = MemoryLedger()
    held: list[Ledger] = []

    def make() -> Ledger:
        while held:
            held.pop().close()
        ledger: Ledger = memory if request.param == "memory" else SqliteLedger(tmp_path / "ledger.sqlite")
        held.append(ledger)
        return ledger

    return make


def began(number: int, update_id: str = "u1") -> UpdateBegan:
    engines = (
        EngineAsked(EngineId("e0"), Incarnation("i0"), True),
        EngineAsked(EngineId("e1"), Incarnation("i1"), False),
    )
    return UpdateBegan(UpdateId(update_id), "r", POLICY, WeightVersion(number, Term(3)), 7, engines)


def decided(number: int, ordinal: int, update_id: str = "u1", phase: Phase = Phase.COMMITTED) -> UpdateDecided:
    return UpdateDecided(UpdateId(update_id), POLICY, phase, "", (WeightVersion(number, Term(3)),), ordinal)


def test_each_opening_is_a_higher_coordinator_term(reopen: Reopen) -> None:
    assert [reopen().open(RUN).coordinator_term for _ in range(3)] == [1, 2, 3]


def test_a_lease_and_its_holder_survive(reopen: Reopen) -> None:
    ledger = reopen()
    ledger.open(RUN)
    for term in (1, 2):
        ledger.save(TermGiven(POLICY, Term(term), TrainerId("t"), Incarnation(f"i{term}")))
    again = reopen().open(RUN)
    assert again.leases == (TermGiven(POLICY, Term(2), TrainerId("t"), Incarnation("i2")),)
    assert again.models[POLICY].term == 2


def test_v8_a_number_is_used_up_though_its_update_never_commits(reopen: Reopen) -> None:
    ledger = reopen()
    ledger.open(RUN)
    ledger.save(began(41))
    ledger.save(decided(40, 0, phase=Phase.FAILED))
    assert reopen().open(RUN).next_number == 42


def test_a_number_is_never_given_twice(reopen: Reopen) -> None:
    ledger = reopen()
    ledger.open(RUN)
    ledger.save(began(5, "u1"))
    with pytest.raises(LedgerError):
        ledger.save(began(5, "u2"))


def test_an_update_without_a_decision_is_found_with_its_go(reopen: Reopen) -> None:
    ledger = reopen()
    ledger.open(RUN)
    ledger.save(began(1, "u1"))
    ledger.save(decided(1, 1, "u1"))
    ledger.save(began(2, "u2"))
    assert reopen().open(RUN).open_updates == ((began(2, "u2"), False),)
    ledger = reopen()
    ledger.open(RUN)
    ledger.save(UpdateWentGo(UpdateId("u2")))
    assert reopen().open(RUN).open_updates == ((began(2, "u2"), True),)


def test_what_is_served_and_its_ordinal_survive(reopen: Reopen) -> None:
    ledger = reopen()
    ledger.open(RUN)
    for number in (1, 2):
        ledger.save(began(number, f"u{number}"))
        ledger.save(decided(number, number, f"u{number}"))
    model = reopen().open(RUN).models[POLICY]
    assert (model.served, model.ordinal) == ((WeightVersion(2, Term(3)),), 2)


def test_a_rolling_update_is_found_with_both_versions_served(reopen: Reopen) -> None:
    ledger = reopen()
    ledger.open(RUN)
    ledger.save(began(1, "u1"))
    ledger.save(decided(1, 1, "u1"))
    ledger.save(began(2, "u2"))
    ledger.save(UpdateWentGo(UpdateId("u2")))
    both = (WeightVersion(1, Term(3)), WeightVersion(2, Term(3)))
    ledger.save(UpdateRolled(UpdateId("u2"), POLICY, both, 2))
    again = reopen().open(RUN)
    assert (again.models[POLICY].served, again.models[POLICY].ordinal) == (both, 2)
    assert again.rolled == {UpdateId("u2")}
    assert again.open_updates == ((began(2, "u2"), True),)


def test_an_engine_is_known_until_it_says_goodbye(reopen: Reopen) -> None:
    ledger = reopen()
    ledger.open(RUN)
    ledger.save(EngineKnown(EngineId("e0"), POLICY))
    ledger.save(EngineKnown(EngineId("e1"), POLICY))
    ledger.save(EngineForgotten(EngineId("e0")))
    assert reopen().open(RUN).engines == (EngineKnown(EngineId("e1"), POLICY),)


def test_l7_another_runs_ledger_is_refused(reopen: Reopen) -> None:
    reopen().open(RUN)
    with pytest.raises(LedgerError, match="belongs to run"):
        reopen().open(RunId("other"))


def test_a_second_coordinator_on_the_same_file_is_told_so(tmp_path: Path) -> None:
    first = SqliteLedger(tmp_path / "ledger.sqlite")
    first.open(RUN)
    with pytest.raises(LedgerError, match="another coordinator"):
        SqliteLedger(tmp_path / "ledger.sqlite").open(RUN)
    first.close()


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to look like one" * 20, None])
def test_a_corrupt_or_foreign_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ledger.sqlite"
    if content is not None:
        path.write_bytes(content)
    else:
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE somebody_elses (x)")
        db.commit()
        db.close()
    with pytest.raises(LedgerError):
        SqliteLedger(path).open(RUN)

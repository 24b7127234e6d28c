"""Restarts with an older ledger, repeated requests, and models that nobody trains."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.fleet_book import MAX_UPDATES_KEPT
from controlplane.core.fleet_records import REQUEST_ID_SECONDS, FloorRaised, FrozenServed
from controlplane.core.versions import FROZEN, EngineId, ModelName, Term, UpdateId
from tests.support.fleet_core import POLICY, RUN, TTL, Fleet, hello, two_engines

DIGEST = b"c" * 32


def closed_with(f: Fleet, kind: type[e.WeightplaneError]) -> bool:
    return any(isinstance(x, fx.CloseSession) and isinstance(x.error, kind) for x in f.effects)


# ---- an older copy of the ledger ----


@pytest.mark.parametrize("seen", [{"term": 3}, {"coordinator_term": 7}, {"number": 9}])
def test_an_older_ledger_gives_neither_terms_nor_numbers(seen: dict[str, int]) -> None:
    f = Fleet()
    f.handle(hello(1, **seen))  # type: ignore[arg-type]
    assert f.core.recovering
    f.trainer()
    assert closed_with(f, e.LedgerRegressed)
    assert f.core.model(POLICY).term == 0
    f.pass_time(100 * TTL)
    assert f.core.recovering, "time alone mends nothing"


def test_inv7_no_term_is_given_while_engines_that_may_know_it_are_still_awaited() -> None:
    f, _ = two_engines()
    backup = copy.deepcopy(f.ledger)
    f.trainer("t2", name="successor", takeover=True)  # term 2, of which the copy knows nothing
    again = Fleet(backup)
    with pytest.raises(e.CoordinatorRecovering):
        again.trainer("t3", name="asks first", takeover=True)
    assert again.core.model(POLICY).term == 1
    again.handle(hello(1, "e0", term=2, coordinator_term=1))
    again.trainer("t3", name="asks again", takeover=True)
    assert closed_with(again, e.LedgerRegressed)
    with pytest.raises(e.LedgerRegressed):
        again.begin("u", term=2)


def test_a_lease_is_given_once_the_engines_were_heard_or_had_their_time() -> None:
    f, _ = two_engines()
    heard, silent = Fleet(copy.deepcopy(f.ledger)), Fleet(copy.deepcopy(f.ledger))
    heard.engine("e0")
    heard.engine("e1")
    silent.pass_time(TTL)
    for again in (heard, silent):
        again.trainer("t2", ended="t1")
        assert again.core.model(POLICY).term == 2


def test_a_lease_that_the_ledger_knows_is_resumed_while_engines_are_awaited() -> None:
    f, _ = two_engines()
    again = Fleet(f.ledger)
    session = again.trainer("t1", held=1)
    assert fx.Welcome(session, Term(1)) in again.effects


def test_an_engine_that_obeys_a_later_coordinator_is_not_welcomed() -> None:
    f = Fleet()
    f.handle(hello(1, coordinator_term=7))
    assert closed_with(f, e.StaleTerm)
    assert not any(isinstance(x, fx.Welcome) for x in f.effects)
    assert f.core.engines == {}


def test_once_accepted_everything_goes_on_above_what_was_seen() -> None:
    f = Fleet()
    f.handle(hello(1, term=3, number=9))
    f.handle(hello(2, "e1", coordinator_term=7))
    f.handle(events.LedgerAccepted(RUN, "ann"))
    assert not f.core.recovering
    assert any(isinstance(x, fx.Save) and isinstance(x.record, FloorRaised) for x in f.effects)
    assert f.core.term == 8
    f.handle(hello(3, term=3, number=9))
    f.handle(hello(4, "e1", coordinator_term=7))
    f.trainer()
    update = f.begin("u", term=5)
    assert (update.version.number, update.version.term) == (10, 5)


def test_the_acceptance_survives_a_restart() -> None:
    f = Fleet()
    f.handle(hello(1, term=3, number=9, coordinator_term=1))
    f.handle(events.LedgerAccepted(RUN, "ann"))
    again = Fleet(f.ledger)
    again.handle(hello(1, term=3, number=9, coordinator_term=2))
    assert not again.core.recovering
    assert again.core.term > f.core.term
    again.trainer()
    assert again.begin("u", term=5).version.number == 10


def test_accepting_a_ledger_that_is_in_order_does_nothing() -> None:
    f = Fleet()
    f.engine("e0")
    assert f.handle(events.LedgerAccepted(RUN, "ann")) == []
    with pytest.raises(e.WrongRun):
        f.handle(replace(events.LedgerAccepted(RUN, "ann"), run_id="other"))  # type: ignore[arg-type]


def test_inv7_a_writer_that_knows_more_than_the_ledger_is_not_fenced_by_it() -> None:
    f = Fleet()
    f.engine("e0")
    f.trainer()
    with pytest.raises(e.LedgerRegressed):
        f.begin("u", term=2)
    with pytest.raises(e.StaleTerm):
        f.begin("u", term=0)


def test_a_trainer_with_a_higher_term_shows_it_too_and_is_not_fenced() -> None:
    f = Fleet()
    f.engine("e0")
    f.trainer(held=5)
    assert closed_with(f, e.LedgerRegressed)
    assert not closed_with(f, e.StaleTerm)


# ---- repeated requests ----


def test_a_request_gets_one_number_also_after_a_restart_and_after_its_update_is_forgotten() -> None:
    f = Fleet()
    engines = {"e0": f.engine("e0")}
    f.trainer()
    first = f.begin("u1", request_id="r1")
    assert f.begin("other", request_id="r1") is first
    again = Fleet(f.ledger)
    engines = {"e0": again.engine("e0")}
    again.trainer(held=1)
    repeated = again.begin("other", request_id="r1")
    assert (repeated.update_id, repeated.version) == (first.update_id, first.version)
    again.handle(events.Tick())
    for i in range(MAX_UPDATES_KEPT + 1):
        again.push(f"more{i}", engines)
    with pytest.raises(e.RequestRepeated) as refused:
        again.begin("other", request_id="r1")
    assert refused.value.update_id == "u1"


def test_a_request_id_is_forgotten_after_its_time() -> None:
    f = Fleet()
    engines = {"e0": f.engine("e0")}
    f.trainer()
    first = f.push("u1", engines)
    f.now += REQUEST_ID_SECONDS + 1
    f.handle(events.EngineReported(engines["e0"], f.states["e0"], True))
    f.push("u2", engines)
    assert f.begin("u3", request_id="u1").version.number > first.version.number


def test_the_same_request_id_for_something_else_is_refused() -> None:
    f = Fleet()
    f.engine("e0")
    f.trainer()
    request = events.UpdateRequested(UpdateId("u"), "r", RUN, POLICY, Term(1), 1, None, b"x" * 32)
    f.handle(request)
    with pytest.raises(e.RequestConflict) as refused:
        f.handle(replace(request, layout_digest=b"y" * 32))
    assert refused.value.field == "layout"


# ---- frozen models ----

REFERENCE = ModelName("reference")


def test_a_frozen_models_engines_serve_what_they_loaded_as_number_0() -> None:
    f = Fleet()
    f.handle(hello(1, frozen=DIGEST, model=REFERENCE))
    assert f.core.model(REFERENCE).served == (FROZEN,)
    assert any(isinstance(x, fx.Save) and x.record == FrozenServed(REFERENCE, DIGEST) for x in f.effects)
    record = f.core.engines[EngineId("e0")]
    f.handle(events.EngineReported(1, record.state, gate_open=True))
    assert f.core.routable(record)
    assert Fleet(f.ledger).core.model(REFERENCE).served == (FROZEN,)


def test_a_second_engine_with_other_weights_is_refused() -> None:
    f = Fleet()
    f.handle(hello(1, frozen=DIGEST, model=REFERENCE))
    f.handle(hello(2, "e1", frozen=DIGEST, model=REFERENCE))
    with pytest.raises(e.VersionConflict):
        f.handle(hello(3, "e2", frozen=b"o" * 32, model=REFERENCE))
    assert EngineId("e2") not in f.core.engines


def test_a_model_is_trained_or_frozen_never_both() -> None:
    f = Fleet()
    f.handle(hello(1, frozen=DIGEST))
    with pytest.raises(e.ModelFrozen):
        f.trainer()
    with pytest.raises(e.ModelFrozen):
        f.handle(hello(2, "e1"))
    g = Fleet()
    g.trainer()
    with pytest.raises(e.ModelFrozen):
        g.handle(hello(1, frozen=DIGEST))

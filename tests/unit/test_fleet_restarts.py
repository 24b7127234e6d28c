"""What a coordinator that starts anew, or stood still, believes, waits for and decides."""

from __future__ import annotations

import pytest

from controlplane.core import errors as e
from controlplane.core import fleet
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import EngineState, Life, Stage
from controlplane.core.fleet_records import EngineAsked, EngineKnown, Recovered, TermGiven, UpdateBegan, UpdateWentGo
from controlplane.core.plan import EnginePlace
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Term, TrainerId, UpdateId, WeightVersion
from controlplane.ledger import MemoryLedger
from tests.support.fleet_core import POLICY, RUN, TTL, Fleet, two_engines


def test_a_restart_waits_for_the_engines_it_knew() -> None:
    f, engines = two_engines()
    f.push("u1", engines)
    again = Fleet(f.ledger)
    assert again.core.recovering
    assert again.core.term == 2
    again.trainer("t1", held=1)
    with pytest.raises(e.CoordinatorRecovering):
        again.begin("u2")
    again.engine("e0")
    again.engine("e1")
    assert not again.core.recovering
    assert again.begin("u2").version.number == 2


def test_a_restart_does_not_wait_longer_than_a_lease() -> None:
    f, _ = two_engines()
    again = Fleet(f.ledger)
    again.engine("e0")
    again.pass_time(TTL)
    assert not again.core.recovering


def test_a_restart_aborts_what_had_no_go_and_decides_what_had_from_reports() -> None:
    began = UpdateBegan(
        UpdateId("u"),
        "r",
        POLICY,
        WeightVersion(5, Term(1)),
        3,
        (EngineAsked(EngineId("e0"), Incarnation("i1"), True),),
    )
    for went_go, stage, expected in ((False, Stage.READY, Phase.FAILED), (True, Stage.APPLIED, Phase.COMMITTED)):
        ledger = MemoryLedger()
        ledger.open(RUN)
        ledger.save(TermGiven(POLICY, Term(1), TrainerId("t"), Incarnation("t1")))
        ledger.save(EngineKnown(EngineId("e0"), POLICY))
        ledger.save(began)
        if went_go:
            ledger.save(UpdateWentGo(UpdateId("u")))
        f = Fleet(ledger)
        update = f.core.updates[UpdateId("u")]
        session = f.engine("e0")
        f.stage(session, "e0", update, stage)
        f.handle(events.Tick())
        assert update.phase is expected


def test_an_empty_ledger_recovers_nothing() -> None:
    core = fleet.FleetCore(fleet.FleetSettings(RUN), Recovered(Term(1)), 0.0)
    assert not core.recovering


def test_a_ledger_older_than_what_engines_applied_keeps_it_recovering() -> None:
    f = Fleet()
    f.trainer()
    state = EngineState(RUN, POLICY, EngineId("e0"), Incarnation("i1"), Life.RUNNING)
    place = EnginePlace(EngineId("e0"), state.incarnation, "e0:1", "host", (DeviceUuid("d"),))
    f.handle(events.EngineConnected(1, place, state, False, (), Term(1), Term(1), max_number=7))
    assert f.core.recovering
    with pytest.raises(e.LedgerRegressed) as refused:
        f.begin("u1")
    assert (refused.value.what, refused.value.known, refused.value.seen) == ("number", 0, 7)


def test_a_coordinator_that_stood_still_itself_judges_nobodys_silence_in_it() -> None:
    f, engines = two_engines()
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.now += 20 * TTL
    f.handle(events.Paused(20 * TTL))
    f.handle(events.Tick())
    f.stage_all(engines, update, Stage.APPLIED)
    assert update.phase is Phase.COMMITTED
    with pytest.raises(e.LeaseHeld):
        f.trainer("t2", name="other")

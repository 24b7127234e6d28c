"""Events: what differs between two views, once, newest first, and never without end."""

from __future__ import annotations

from controlplane.coordinator.happenings import AT_ONCE, KEPT, Happenings, changes
from controlplane.coordinator.metrics import FleetMetrics
from controlplane.core.engine_state import Hold, HoldKind, Stage
from controlplane.core.fleet_events import TrainerReported
from controlplane.core.fleet_records import LostRank
from controlplane.core.versions import Term
from tests.support.scripted_fleet import POLICY, ScriptedFleet, poisoned
from weightplane.v1 import operator_pb2


def names(view: operator_pb2.FleetView) -> list[tuple[str, str]]:
    return [(e.name, e.subject) for e in view.events]


def test_equal_views_differ_in_nothing() -> None:
    view = poisoned()
    assert list(changes(view, view)) == []


def test_an_update_is_told_from_its_begin_to_its_decision() -> None:
    fleet = ScriptedFleet(2)
    began = len(fleet.view().events)
    update = fleet.begin(1)
    fleet.view()
    for stage in (Stage.RECEIVING, Stage.READY):
        for name in ("engine-0", "engine-1"):
            fleet.stage(name, update, stage)
    fleet.view()
    for stage in (Stage.INSTALLING, Stage.APPLIED):
        for name in ("engine-0", "engine-1"):
            fleet.stage(name, update, stage)
    events = list(fleet.view().events)[: -began or None]
    of_update = [e for e in reversed(events) if e.name.startswith("update_")]
    assert [e.name for e in of_update] == ["update_began", "update_went_go", "update_decided"]
    assert {e.update_id for e in of_update} == {update.update_id}
    assert ("model_served", "policy") in [(e.name, e.subject) for e in events]


def test_inv8_silence_is_told_and_what_was_said_before_it_is_no_state() -> None:
    fleet = ScriptedFleet(2)
    fleet.push(1)
    fleet.view()
    fleet.lose("engine-1")
    view = fleet.view()
    assert names(view)[0] == ("engine_unknown", "engine-1")
    assert view.events[0].alarming
    assert not view.engines[1].HasField("lag")
    assert view.engines[0].lag == 0


def test_a_trainer_that_says_goodbye_left_and_is_no_alarm_and_one_that_falls_silent_is() -> None:
    fleet = ScriptedFleet(1)
    fleet.lose("trainer")
    silent = fleet.view()
    assert (names(silent)[0], silent.events[0].alarming) == (("trainer_silent", "trainer"), True)
    assert not silent.trainers[0].left
    fleet = ScriptedFleet(1)
    fleet.leave("trainer")
    gone = fleet.view()
    assert (names(gone)[0], gone.events[0].alarming) == (("trainer_left", "trainer"), False)
    assert (gone.trainers[0].left, gone.trainers[0].connected) == (True, False)
    assert not [s for f in FleetMetrics(lambda: gone).collect() for s in f.samples if "trainer" in s.labels]
    assert [s for f in FleetMetrics(lambda: silent).collect() for s in f.samples if "trainer" in s.labels]


def test_a_rank_that_died_is_told_once_and_its_next_life_begins_anew() -> None:
    fleet = ScriptedFleet(1)
    fleet.view()

    def lose(*ranks: int) -> operator_pb2.FleetView:
        lost = tuple(LostRank(r, f"process {r} ended") for r in ranks)
        fleet.handle(TrainerReported(fleet.sessions["trainer"], Term(1), 3, "train", 1, lost=lost))
        return fleet.view()

    view = lose(1)
    assert [(r.rank, r.cause) for r in view.trainers[0].status.lost_ranks] == [(1, "process 1 ended")]
    assert (names(view)[0], view.events[0].alarming) == (("rank_lost", "trainer"), True)
    assert view.events[0].text == "rank 1: process 1 ended"
    again = lose(1)
    assert names(again).count(("rank_lost", "trainer")) == 1
    assert names(lose(1, 0)).count(("rank_lost", "trainer")) == 2
    fleet.leave("trainer")
    fleet.train()
    assert not fleet.view().trainers[0].status.lost_ranks


def test_a_trainer_that_left_and_comes_back_is_missed_again() -> None:
    fleet = ScriptedFleet(1)
    fleet.leave("trainer")
    fleet.train()
    assert not fleet.view().trainers[0].left
    fleet.lose("trainer")
    assert not fleet.view().trainers[0].left


def test_what_somebody_should_look_at_is_alarming_and_the_rest_is_not() -> None:
    fleet = ScriptedFleet(3)
    fleet.push(1)
    fleet.view()
    fleet.push(2, fails=frozenset({"engine-2"}))
    fleet.report("engine-0", holds=frozenset({Hold(HoldKind.OPERATOR, "ann")}))
    view = fleet.view()
    alarming = {(e.name, e.subject) for e in view.events if e.alarming}
    assert alarming == {("engine_state", "engine-2"), ("update_decided", "policy")}


def test_a_new_life_and_a_goodbye_are_told() -> None:
    fleet = ScriptedFleet(1)
    fleet.sessions.pop("engine-0")
    fleet.join("engine-0", 7)
    assert fleet.view().events[0].text.endswith("a new life")


def test_events_are_bounded_however_much_happens() -> None:
    seen = Happenings()
    views = [operator_pb2.FleetView(), ScriptedFleet(3 * KEPT, trainer=False).view()]
    for view in views:
        del view.events[:]
        seen.see(view)
    assert len(views[-1].events) == AT_ONCE
    for _ in range(5):
        for view in views:
            fresh = operator_pb2.FleetView()
            fresh.CopyFrom(view)
            del fresh.events[:]
            seen.see(fresh)
    assert len(fresh.events) == KEPT


def test_an_update_of_this_life_has_its_times_and_each_engine_its_stages() -> None:
    fleet = ScriptedFleet(2)
    fleet.push(1)
    (update,) = fleet.view().updates
    assert update.begin_time.ToNanoseconds() < update.go_time.ToNanoseconds() < update.decide_time.ToNanoseconds()
    assert not update.HasField("deadline_time")
    for outcome in update.engines:
        assert [s.stage for s in outcome.stage_times] == [1, 2, 3, 4]
        times = [s.time.ToNanoseconds() for s in outcome.stage_times]
        assert times == sorted(times)
        assert outcome.timings.install.ToMilliseconds() == 410


def test_an_update_from_before_a_restart_has_no_begin() -> None:
    before = ScriptedFleet(2)
    before.begin(1)
    after = ScriptedFleet(0, ledger=before.ledger, trainer=False)
    (update,) = after.view().updates
    assert not update.HasField("begin_time")
    assert list(after.view().awaited_engine_ids) == ["engine-0", "engine-1"]


def test_the_latest_plan_of_each_model_is_shown() -> None:
    fleet = ScriptedFleet(2)
    assert not fleet.view().plans
    fleet.push(1)
    (shown,) = fleet.view().plans
    assert (shown.model, [a.engine.engine_id for a in shown.plan.assignments]) == (POLICY, ["engine-0", "engine-1"])

"""An update from begin to decision: who is required, what is served, what is routable, whose words count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Hold, HoldKind, Progress, Stage, Unset
from controlplane.core.fleet_records import UpdateBegan, UpdateDecided, UpdateWentGo
from controlplane.core.plan import RankPlace
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank, RunId, Term, UpdateId, WeightVersion
from tests.support.fleet_core import POLICY, TTL, Fleet, two_engines


def test_an_update_is_ready_then_goes_then_is_decided() -> None:
    f, engines = two_engines()
    update = f.begin("u1")
    assert update.version == WeightVersion(1, Term(1))
    f.stage(engines["e0"], "e0", update, Stage.READY)
    assert update.phase.value == "preparing"
    f.stage(engines["e1"], "e1", update, Stage.READY)
    assert update.phase is Phase.GO
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.GO, ())
    f.stage(engines["e1"], "e1", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.COMMITTED, (update.version,))
    assert f.core.model(POLICY).ordinal == 1


def test_inv9_every_record_is_saved_before_anything_is_told() -> None:
    f, engines = two_engines()
    f.push("u1", engines)
    kinds = {type(x.record) for batch in f.batches for x in batch if isinstance(x, fx.Save)}
    assert {UpdateBegan, UpdateWentGo, UpdateDecided} <= kinds
    for batch in f.batches:
        told = [not isinstance(x, fx.Save) for x in batch]
        assert told == sorted(told)


def test_an_engine_that_refuses_before_go_fails_the_update_and_costs_nothing() -> None:
    f, engines = two_engines()
    first = f.push("u1", engines)
    update = f.begin("u2")
    f.stage(engines["e0"], "e0", update, Stage.READY)
    f.stage(engines["e1"], "e1", update, Stage.ABORTED)
    assert (update.phase, f.served) == (Phase.FAILED, (first.version,))
    assert "e1 aborted" in update.cause


def test_p3_one_of_two_installs_fails_the_other_serves_and_the_reply_names_both() -> None:
    f, engines = two_engines()
    f.push("u1", engines)
    update = f.begin("u2")
    f.stage_all(engines, update, Stage.READY)
    for name, session in engines.items():
        f.report(session, name, weights=Unset(), progress=Progress(update.update_id, update.version, Stage.INSTALLING))
    f.stage(engines["e0"], "e0", update, Stage.FAILED)
    f.stage(engines["e1"], "e1", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.DEGRADED, (update.version,))
    assert [str(o) for _, o in sorted(update.outcomes.items())] == ["e0 failed (X: )", "e1 applied"]


def test_after_go_the_old_version_is_served_on_while_a_live_engine_holds_it() -> None:
    f, engines = two_engines()
    first = f.push("u1", engines)
    update = f.begin("u2")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.ABORTED)
    f.stage(engines["e1"], "e1", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.FAILED, (first.version,))


def test_a_new_incarnation_in_mid_update_is_a_lost_engine() -> None:
    f, engines = two_engines()
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.engine("e1", incarnation="i2")
    assert update.phase is Phase.DEGRADED
    assert update.outcomes[EngineId("e1")].lost


def test_inv9_an_engine_that_applied_and_died_before_the_decision_does_not_count() -> None:
    f, engines = two_engines()
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.engine("e0", incarnation="i2")
    f.stage(engines["e1"], "e1", update, Stage.FAILED)
    assert (update.phase, f.served) == (Phase.FAILED, ())


def test_silence_after_go_ends_within_the_leases_time() -> None:
    f, engines = two_engines()
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.now += TTL
    f.report(engines["e0"], "e0")
    f.pass_time(1.0)
    assert update.phase is Phase.DEGRADED


def test_an_update_that_is_not_ready_in_time_fails() -> None:
    f, engines = two_engines()
    update = f.begin("u1")
    for _ in range(40):
        f.now += TTL - 1
        for name, session in engines.items():
            f.report(session, name)
        f.handle(events.Tick())
    assert update.phase is Phase.FAILED
    assert "not ready in time: e0, e1" in update.cause


def test_required_are_the_routable_and_the_rest_is_optional() -> None:
    f, engines = two_engines()
    f.push("u1", engines)
    engines["late"] = f.engine("late")
    update = f.begin("u2")
    assert {a.engine.engine_id: a.required for a in update.plan.assignments} == {"e0": True, "e1": True, "late": False}
    for name in ("e0", "e1"):
        f.stage(engines[name], name, update, Stage.READY)
    assert update.phase is Phase.GO


def test_a_held_engine_is_no_longer_required() -> None:
    f, engines = two_engines()
    f.push("u1", engines)
    f.report(engines["e0"], "e0", holds=frozenset({Hold(HoldKind.OPERATOR, "me")}))
    update = f.begin("u2")
    assert [a.required for a in update.plan.assignments] == [False, True]


def test_an_empty_plan_is_refused_and_uses_no_number_up() -> None:
    f = Fleet()
    f.trainer()
    with pytest.raises(e.NoEngines):
        f.begin("u1")
    f.engine("e0")
    assert f.begin("u2").version.number == 1


def test_a_second_begin_is_refused_and_a_repeat_gets_the_same_answer() -> None:
    f, _ = two_engines()
    first = f.begin("u1", request_id="r1")
    assert f.begin("u2", request_id="r1") is first
    with pytest.raises(e.UpdateInProgress):
        f.begin("u3", request_id="r3")


# ---- routes ----


def test_inv10_routable_needs_gate_session_and_served_version() -> None:
    f, engines = two_engines()
    f.push("u1", engines)
    record = f.core.engines[EngineId("e0")]
    assert f.core.routable(record)
    f.handle(events.SessionEnded(engines["e0"], goodbye=False))
    assert not f.core.routable(record)
    assert f.core.routable(f.core.engines[EngineId("e1")])


def test_l1_a_replacement_is_not_routable_before_it_holds_what_is_served() -> None:
    f, engines = two_engines()
    f.push("u1", engines)
    f.engine("e0", incarnation="i2")
    assert not f.core.routable(f.core.engines[EngineId("e0")])


def test_l2_an_old_lifes_words_are_refused() -> None:
    f, engines = two_engines()
    new = f.engine("e0", incarnation="i2")
    assert f.handle(events.EngineReported(engines["e0"], f.states["e0"], True)) == []
    stale = replace(f.states["e0"], incarnation=Incarnation("i1"))
    with pytest.raises(e.WrongIncarnation):
        f.handle(events.EngineReported(new, stale, True))


def test_l2_a_hello_of_an_earlier_life_that_arrives_late_is_refused() -> None:
    f, _ = two_engines()
    f.engine("e0", incarnation="i3", life=3)
    with pytest.raises(e.WrongIncarnation) as refused:
        f.engine("e0", incarnation="i2", life=2)
    assert (refused.value.expected, refused.value.got) == ("i3", "i2")
    assert f.core.engines[EngineId("e0")].state.incarnation == "i3"
    f.engine("e0", incarnation="i4", life=4)
    f.engine("e0", incarnation="of an agent without a disk")


def test_inv8_silence_is_unknown() -> None:
    f, engines = two_engines()
    f.push("u1", engines)
    f.pass_time(TTL + 1)
    assert all(r.session is None for r in f.core.engines.values())


def test_some_but_not_all_of_an_engines_devices_is_a_misfit_at_its_hello() -> None:
    f = Fleet()
    f.trainer(ranks=(RankPlace(Rank(0), "host", DeviceUuid("d0")),))
    with pytest.raises(e.EngineMisfit) as refusal:
        f.engine("wide", devices=("d0", "d1"))
    assert (refusal.value.held, refusal.value.total, refusal.value.missing) == (1, 2, ["d1"])


def test_l7_another_runs_hello_and_update_are_refused() -> None:
    f, _ = two_engines()
    with pytest.raises(e.WrongRun):
        f.handle(events.UpdateRequested(UpdateId("u"), "r", RunId("other"), POLICY, Term(1), 1, None))
    state = replace(f.states["e0"], run_id=RunId("other"))
    place = f.core.engines[EngineId("e0")].place
    with pytest.raises(e.WrongRun):
        f.handle(events.EngineConnected(1, place, state, False, (), Term(0), Term(0)))

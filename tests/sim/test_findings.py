"""What the simulator found in the cores about updates, sessions and units, each at its smallest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as fe
from controlplane.core.assembly import Record
from controlplane.core.engine_state import EngineState, Held, Life, Poisoned, Progress, Stage, Timings, Unset
from controlplane.core.fleet_records import EngineAsked, EngineKnown, TermGiven, UpdateBegan, UpdateDecided
from controlplane.core.plan import EnginePlace, RankPlace
from controlplane.core.update_policy import UpdatePolicy
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import (
    DeviceUuid,
    EngineId,
    Incarnation,
    ModelName,
    Rank,
    Term,
    TrainerId,
    UpdateId,
    WeightVersion,
)
from controlplane.ledger import MemoryLedger
from tests.sim.scenes import five, hello, kept
from tests.support.engine_core import LAYOUT, Agent, checksums, version
from tests.support.fleet_core import POLICY, RUN, TTL, Fleet, two_engines


def test_inv9_a_welcome_never_tells_of_a_decision_before_it_is_saved() -> None:
    f, engines = two_engines()
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.effects.clear()
    f.engine("e1", incarnation="i2")
    assert update.phase is Phase.DEGRADED
    kinds = [type(x.record) if isinstance(x, fx.Save) else type(x) for x in f.effects]
    assert kinds.index(UpdateDecided) < kinds.index(fx.Welcome)


def test_a_restart_aborts_an_update_without_go_also_when_every_engine_says_that_it_is_ready() -> None:
    ledger = MemoryLedger()
    ledger.open(RUN)
    ledger.save(TermGiven(POLICY, Term(1), TrainerId("t"), Incarnation("t1")))
    ledger.save(EngineKnown(EngineId("e0"), POLICY))
    began = (EngineAsked(EngineId("e0"), Incarnation("i1"), True),)
    ledger.save(UpdateBegan(UpdateId("u"), "r", POLICY, WeightVersion(5, Term(1)), 3, began))
    f = Fleet(ledger)
    progress = Progress(UpdateId("u"), WeightVersion(5, Term(1)), Stage.READY)
    state = EngineState(RUN, POLICY, EngineId("e0"), Incarnation("i1"), Life.RUNNING, progress=progress)
    f.handle(hello(state))
    f.handle(fe.Tick())
    assert f.core.updates[UpdateId("u")].phase is Phase.FAILED


def test_inv9_an_engine_that_applied_and_fell_silent_for_too_long_does_not_carry_a_commit() -> None:
    f, engines = two_engines()
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.handle(fe.SessionEnded(engines["e0"], goodbye=False))
    f.now += TTL + 1
    f.report(engines["e1"], "e1")
    f.handle(fe.Tick())
    f.stage(engines["e1"], "e1", update, Stage.FAILED)
    assert (update.phase, f.served) == (Phase.FAILED, ())


def test_inv9_silence_is_judged_at_the_decision_and_not_only_at_ticks() -> None:
    f, engines = two_engines()
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.now += 20 * TTL
    f.handle(fe.SessionEnded(engines["e0"], goodbye=False))
    assert update.phase is not Phase.DEGRADED


def test_inv9_an_engine_that_applied_and_is_poisoned_since_does_not_carry_a_commit() -> None:
    f, engines = two_engines()
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.report(engines["e0"], "e0", weights=Poisoned("spans disagree"))
    f.stage(engines["e1"], "e1", update, Stage.FAILED)
    assert (update.phase, f.served) == (Phase.FAILED, ())


def test_inv11_an_install_that_touched_nothing_does_not_heal_an_engine_whose_spans_disagreed() -> None:
    agent = Agent()
    agent.apply(1)
    agent.receive(2, stream=2, seed=5)
    agent.commit(2, stream=2, seed=5)
    agent.handle(ee.SpansDisagreed("at the border of this install"))
    agent.handle(ee.Quiesced())
    agent.handle(ee.InstallEnded(e.InstallFailed("e0", "1.2", False, "no byte could be read"), touched=False))
    assert agent.applied is None


def test_a_refused_chunk_leaves_the_account_as_it_was() -> None:
    agent = Agent()
    agent.open(1)
    agent.handle(ee.LayoutArrived(1, LAYOUT))
    good, bad = Record(0, 0, 0, 16, checksums(1)[0]), Record(9, 0, 0, 1, None)
    with pytest.raises(e.FrameInvalid):
        agent.handle(ee.ChunkArrived(1, version(1), 0, (good, bad), 28))
    assert agent.core.update is not None
    assert agent.core.update.assembly is not None
    assert agent.core.update.assembly.byte_count == 0


def test_a_repeated_begin_gets_the_same_answer_also_when_its_update_is_decided() -> None:
    f, engines = two_engines()
    first = f.push("u1", engines)
    again = f.handle(fe.UpdateRequested(UpdateId("u2"), "u1", RUN, POLICY, Term(1), 1, None))
    assert [x.update for x in again if isinstance(x, fx.UpdatePlanned)] == [first]


def test_inv7_a_ledger_that_was_put_back_gives_no_term_that_agents_know() -> None:
    f = Fleet()
    state = EngineState(RUN, POLICY, EngineId("e0"), Incarnation("i1"), Life.RUNNING)
    f.handle(replace(hello(state), max_term=Term(3), max_coordinator_term=Term(1), max_number=7))
    f.trainer()
    assert f.core.model(POLICY).term == 0
    assert any(isinstance(x, fx.CloseSession) and isinstance(x.error, e.LedgerRegressed) for x in f.effects)
    f.handle(fe.LedgerAccepted(RUN, "ann"))
    f.trainer()
    assert f.core.model(POLICY).term > 3


def test_l2_a_second_hello_of_the_same_life_does_not_tell_it_that_it_is_another() -> None:
    f = Fleet()
    f.engine("e0")
    f.effects.clear()
    f.engine("e0")
    errors = [x.error for x in f.effects if isinstance(x, fx.CloseSession)]
    assert errors
    assert not any(isinstance(error, e.WrongIncarnation) for error in errors)


# ---- found with several models, groups and units ----


def test_inv9_an_engine_that_applied_is_poisoned_and_met_another_update_since_does_not_carry_a_commit() -> None:
    """The coordinator did not hear it in between: its last word speaks of that other update."""
    f, engines = two_engines()
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    other = Progress(UpdateId("other"), WeightVersion(99, Term(1)), Stage.ABORTED)
    f.report(engines["e0"], "e0", weights=Poisoned("spans disagree"), progress=other)
    f.stage(engines["e1"], "e1", update, Stage.FAILED)
    assert (update.phase, f.served) == (Phase.FAILED, ())


def test_spans_that_disagree_in_mid_install_do_not_end_the_agents_life() -> None:
    """A full update heals, also one that was installing already."""
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    agent.handle(ee.Quiesced())
    agent.handle(ee.SpansDisagreed("a sample that ended"))
    assert agent.applied is None
    agent.handle(ee.CanaryPassed(Timings()))
    assert agent.applied == version(1)


def test_a_group_is_not_asked_of_a_model_whose_engines_are_not_in_it() -> None:
    critic = ModelName("critic")
    f = Fleet(policy=UpdatePolicy(min_engines={"decode": 1}))
    state = EngineState(RUN, critic, EngineId("c0"), Incarnation("i1"), Life.RUNNING)
    f.handle(replace(hello(state), max_term=Term(0)))
    name, ranks = TrainerId("ct"), (RankPlace(Rank(0), "host", DeviceUuid("dev-ct")),)
    f.handle(fe.TrainerConnected(500, RUN, critic, name, Incarnation("ct1"), ranks, Term(0), "", False))
    request = fe.UpdateRequested(UpdateId("u"), "u", RUN, critic, Term(1), 1, None)
    with pytest.raises(e.NotEnoughEngines):  # nobody is in the group yet: it may be anybody's
        f.handle(request)
    f.engine("e0", group="decode")
    assert any(isinstance(x, fx.UpdatePlanned) for x in f.handle(request))


def test_inv10_units_of_two_models_may_have_one_name() -> None:
    """What becomes of one is told to its own members, whoever else has a unit of that name."""
    f = Fleet()
    engines = {name: f.engine(name, unit="pd0", unit_size=2) for name in ("p", "d")}
    f.trainer()
    f.push("u1", engines)
    for i, name in enumerate(("cp", "cd")):  # they say hello last, so that theirs is the last unit of that name
        state = EngineState(RUN, ModelName("critic"), EngineId(name), Incarnation("i1"), Life.RUNNING)
        place = EnginePlace(state.engine_id, state.incarnation, name, "host", (), unit="pd0", unit_size=2)
        f.handle(fe.EngineConnected(700 + i, place, state, False, (), Term(0), Term(0)))
    f.effects.clear()
    f.report(engines["p"], "p", weights=Unset())
    assert any(isinstance(x, fx.BroadcastState) for x in f.effects)
    assert f.core.served_to(engines["d"], POLICY) == ()


# ---- found with engines that stay at a version ----


def test_inv10_a_keep_that_was_made_before_its_engine_came_does_not_part_a_unit() -> None:
    """The unit has one gate: its other member would never open it for what only the fleet serves."""
    f = Fleet()
    engines = {name: f.engine(name, unit="pd0", unit_size=2) for name in ("p", "d")}
    f.trainer()
    first = f.push("u1", engines)
    f.handle(fe.CheckpointPublished(RUN, Term(1), kept(first)))
    f.handle(fe.SessionEnded(engines["d"], goodbye=True))
    f.handle(fe.KeepRequested(RUN, EngineId("d"), POLICY, first.version.number))
    engines["d"] = f.engine("d", incarnation="i2", unit="pd0", unit_size=2)
    second = f.push("u2", engines)
    assert sorted(second.outcomes) == ["d", "p"]
    assert f.served == (second.version,)
    assert all(f.core.served_to(session, POLICY) == (second.version,) for session in engines.values())


def test_the_majority_of_those_that_spoke_first_is_no_majority() -> None:
    """Two wrong engines and a right one were the first three of five: the right one was doubted, the wrong served."""
    f, _, applies = five("e1", "e3")
    for name in ("e1", "e3", "e0"):
        applies(name)
    assert f.core.doubts == {}
    for name in ("e2", "e4"):
        applies(name)
    assert sorted(f.core.doubts) == ["e1", "e3"]


def test_who_falls_silent_is_not_waited_for_with_a_judgement() -> None:
    """The others' words are judged before the decision that its silence brings."""
    f, update, applies = five("e1")
    for name in ("e0", "e1", "e2"):
        applies(name)
    assert f.core.doubts == {}
    sessions = {name: record.session or 0 for name, record in f.core.engines.items()}
    for name in ("e3", "e4"):
        f.handle(fe.SessionEnded(sessions[EngineId(name)], goodbye=False))
    f.now += TTL - 1
    for name in ("e0", "e1", "e2"):
        f.report(sessions[EngineId(name)], name)
    f.pass_time(2.0)
    assert sorted(f.core.doubts) == ["e1"]
    bad = sorted(o.engine_id for o in update.outcomes.values() if o.error_reason == "CANARY_DISAGREES")
    assert (update.phase, bad) == (Phase.DEGRADED, ["e1"])


def test_a_holder_is_what_its_last_report_says() -> None:
    """The frame of the findings above: a healthy engine does carry a commit."""
    f, engines = two_engines()
    update = f.push("u1", engines)
    assert update.phase is Phase.COMMITTED
    assert all(r.state.weights == Held(update.version, b"d") for r in f.core.engines.values())

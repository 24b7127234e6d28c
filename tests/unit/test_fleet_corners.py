"""Corners of the coordinator's core that nothing else turns: words that come late, twice, or from the wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.canary import Canary, Verification
from controlplane.core.engine_state import Held, Life, Poisoned, Stage
from controlplane.core.fleet_doubts import verification
from controlplane.core.fleet_plans import check_formats
from controlplane.core.fleet_records import EngineKept
from controlplane.core.kept_stacks import MAX_UPDATES, ProcessStacks, StackShelf
from controlplane.core.plan import Apply, Assignment, EnginePlace, Load, Plan, RankPlace, Transport
from controlplane.core.plan_costs import engine_costs
from controlplane.core.planner import make_plan
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import (
    FROZEN,
    DeviceUuid,
    EngineId,
    Incarnation,
    ModelName,
    Rank,
    Term,
    UpdateId,
    WeightVersion,
)
from tests.support.checkpointed_fleet import carries, keep, kept, publish, served
from tests.support.fleet_core import POLICY, RUN, TTL, Fleet, hello
from tests.support.planned_fleet import LOAD, ask, trainer
from tests.support.singers import ANSWERS, Singers

NOBODY = UpdateId("nobody's")


# ---- sessions ----


def test_l2_a_session_speaks_for_its_own_engine_alone() -> None:
    f = Fleet()
    session = f.engine("e0")
    state = f.states["e0"]
    for wrong, error in (
        (replace(state, engine_id=EngineId("e1")), e.UnknownEngine),
        (replace(state, model=ModelName("critic")), e.WrongModel),
    ):
        with pytest.raises(error):
            f.handle(events.EngineReported(session, wrong, False))
    assert f.core.engines[EngineId("e0")].state == state


def test_an_engine_that_comes_back_after_its_session_ended_takes_nobodys_place() -> None:
    f = Fleet()
    f.handle(events.SessionEnded(f.engine("e0"), goodbye=False))
    f.effects.clear()
    f.engine("e0")
    assert not any(isinstance(x, fx.CloseSession) for x in f.effects)


def test_an_engine_that_says_goodbye_is_lost_to_the_update_under_way_at_once() -> None:
    f = Fleet()
    engines = {name: f.engine(name) for name in ("e0", "e1")}
    f.trainer()
    update = f.begin("u1")
    f.handle(events.SessionEnded(engines["e0"], goodbye=True))
    outcome = update.outcomes[EngineId("e0")]
    assert (outcome.lost, outcome.error_message) == (True, "it left")


def test_a_unit_is_gone_with_its_last_engine() -> None:
    f = Fleet()
    sessions = [f.engine(name, unit="pair", unit_size=2) for name in ("p", "d")]
    members = []
    for session in sessions:
        f.handle(events.SessionEnded(session, goodbye=True))
        members.append(sum(map(len, f.core._units.values())))
    assert (members, f.core._units) == ([1, 0], {})


# ---- trainers ----


def test_a_trainer_with_a_part_of_an_engines_devices_gets_no_lease() -> None:
    f = Fleet()
    f.engine("wide", devices=("d0", "d1"))
    with pytest.raises(e.EngineMisfit):
        f.trainer(ranks=(RankPlace(Rank(0), "host", DeviceUuid("d0")),))
    assert f.core.model(POLICY).term == 0


def test_a_plan_refuses_a_part_of_an_engines_devices_by_itself() -> None:
    place = EnginePlace(EngineId("e"), Incarnation("i"), "e:1", "host", (DeviceUuid("d0"), DeviceUuid("d1")))
    with pytest.raises(e.EngineMisfit):
        make_plan(1, [place], frozenset(), [RankPlace(Rank(0), "host", DeviceUuid("d0"))])


def test_a_trainers_word_after_its_session_renews_no_lease() -> None:
    f = Fleet()
    session = f.trainer()
    f.handle(events.SessionEnded(session, goodbye=False))
    before = f.core.trainers[POLICY].expires_at
    f.now = 1.0
    assert f.handle(events.TrainerReported(session, Term(1), 1, "train", 9)) == []
    assert f.core.trainers[POLICY].expires_at == before


def test_a_trainer_that_left_on_purpose_leaves_its_lease_to_the_next_one_at_once() -> None:
    f = Fleet()
    session = f.trainer()
    f.handle(events.TrainerReported(session, Term(1), 1, "train", 1, holds_devices=True))
    f.handle(events.SessionEnded(session, goodbye=True))
    assert not f.core.trainers[POLICY].holds_devices
    f.trainer("t2", name="another")
    assert f.core.model(POLICY).term == 2


def test_a_trainers_format_is_asked_of_those_engines_alone_that_say_what_they_take() -> None:
    f = Fleet()
    for name, takes in (("e0", "format:plain"), ("e1", "staged")):
        f.engine(name)
        f.core.engines[EngineId(name)].capabilities = (takes,)
    check_formats(list(f.core.engines.values()), replace(LOAD, weights_format="plain"))
    with pytest.raises(e.FormatMismatch, match="e0"):
        check_formats(list(f.core.engines.values()), replace(LOAD, weights_format="fp8"))


# ---- updates ----


def test_an_abort_means_an_update_that_is_known_and_is_not_gone_yet() -> None:
    """INV-4: before go it costs nothing, after go the reports decide, and what is decided stays so."""
    f = Fleet()
    session = f.engine("e0")
    f.trainer()

    def abort(update_id: UpdateId) -> list[fx.Effect]:
        return f.handle(events.AbortRequested(RUN, update_id, Term(1), "why not"))

    with pytest.raises(e.UnknownUpdate):
        abort(NOBODY)
    update = f.begin("u1")
    f.stage(session, "e0", update, Stage.READY)
    with pytest.raises(e.FrameOutOfOrder, match="reports"):
        abort(update.update_id)
    for stage in (Stage.INSTALLING, Stage.APPLIED):
        f.stage(session, "e0", update, stage)
    assert abort(update.update_id) == []
    assert update.phase is Phase.COMMITTED


def test_inv6_a_rollback_that_is_asked_for_again_has_the_same_number() -> None:
    f, _, update = served()
    told = []
    for update_id in ("r1", "r2"):
        event = events.RollbackRequested(UpdateId(update_id), "once", RUN, POLICY, update.version.number)
        told += [x.update for x in f.handle(event) if isinstance(x, fx.UpdatePlanned)]
    assert told[0] is told[1]
    assert f.core.next_number == told[0].version.number + 1


def test_who_was_doubted_is_heard_no_more_in_that_update() -> None:
    """What it says of it from then on is that it heeded the doubt."""
    f = Singers(5)
    update = f.go("u1")
    for name, answer in (("e0", "wrong"), ("e1", "right"), ("e2", "right"), ("e3", "right")):
        f.say(name, update, answer)
    doubted = update.outcomes[EngineId("e0")]
    assert (update.phase, doubted.error_reason) == (Phase.GO, "CANARY_DISAGREES")
    f.report(f.by_name["e0"], "e0", weights=Poisoned("doubted"))
    assert update.outcomes[EngineId("e0")] is doubted


def test_a_doubt_changes_only_an_outcome_that_applied() -> None:
    f = Singers(3)
    update = f.go("u1")
    error = e.CanaryDisagrees(engine_id="e0", version="1.1", cause="others differ")
    assert not update.doubt(EngineId("e0"), error)
    assert not update.doubt(EngineId("not asked"), error)


def test_an_engine_is_doubted_after_the_decision_too_and_the_decision_stays() -> None:
    f = Singers(4)
    update = f.go("u1")
    for name in f.by_name:
        f.say(name, update, "right")
    assert update.phase is Phase.COMMITTED
    f.report(f.by_name["e0"], "e0", canary=Canary(ANSWERS["wrong"]))
    assert list(f.core.doubts) == ["e0"]
    assert update.outcomes[EngineId("e0")].applied


def test_what_an_engine_holds_is_verified_by_its_trainers_word_or_by_most_of_its_equals() -> None:
    f = Singers(3)
    state = f.states["e0"]
    assert verification(f.core, state) is Verification.UNVERIFIED
    heard = replace(state, canary=Canary((-1.0,)))
    assert verification(f.core, heard) is Verification.UNVERIFIED
    f.core.agreed.add(EngineId("e0"))
    assert verification(f.core, heard) is Verification.MAJORITY
    by_reference = replace(state, canary=Canary((-1.0,), by_reference=True))
    assert verification(f.core, by_reference) is Verification.REFERENCE


# ---- checkpoints ----


def test_a_checkpoint_that_is_published_again_is_written_once() -> None:
    f, _, update = served()
    publish(f, update)
    assert not any(isinstance(x, fx.Save) for x in f.effects)


def test_inv6_a_checkpoint_of_a_version_that_is_served_no_more_is_compared_with_what_its_engines_reported() -> None:
    f = Fleet()
    engines = {"e0": f.engine("e0")}
    f.trainer()
    first = f.push("u1", engines)
    f.push("u2", engines)
    with pytest.raises(e.VersionConflict):
        f.handle(events.CheckpointPublished(RUN, Term(1), kept(first.version, b"other")))
    publish(f, first)
    assert first.version.number in f.core.model(POLICY).checkpoints


def test_a_checkpoint_is_kept_for_engines_of_its_own_model_alone() -> None:
    f, _, update = served()
    other = EngineKept(EngineId("c0"), ModelName("critic"), WeightVersion(update.version.number, Term(1)), b"d")
    f.core.kept[other.engine_id] = other
    f.push("u2", {name: r.session for name, r in f.core.engines.items() if r.session is not None})
    f.handle(events.CheckpointRetired(RUN, POLICY, Term(1), update.version.number))
    assert update.version.number not in f.core.model(POLICY).checkpoints


def test_an_end_of_a_carry_whose_engine_left_is_nobodys() -> None:
    f, _, _ = served()
    session = f.engine("late")
    (carry,) = carries(f)
    f.handle(events.SessionEnded(session, goodbye=True))
    assert f.handle(events.CarryEnded(carry.update_id, carry.engine.engine_id, None)) == []


# ---- engines that stay ----


def test_a_keep_that_is_asked_for_again_is_written_once() -> None:
    f, _, update = served()
    keep(f, update.version.number, "e0")
    f.effects.clear()
    keep(f, update.version.number, "e0")
    assert f.effects == []


def test_an_engine_of_a_frozen_model_stays_anyway() -> None:
    f = Fleet()
    f.handle(hello(1, frozen=b"loaded"))
    with pytest.raises(e.ModelFrozen, match="anyway"):
        keep(f, FROZEN.number, "e0")


def test_an_engine_that_reads_no_checkpoints_stays_only_at_what_it_holds() -> None:
    f, _, update = served()
    f.engine("late")
    f.core.engines[EngineId("late")].capabilities = ()
    with pytest.raises(e.UnsupportedByEngine):
        keep(f, update.version.number, "late")


def test_an_engine_that_is_being_brought_another_version_is_kept_after_it() -> None:
    f, engines, first = served()
    second = f.push("u2", engines)
    publish(f, second)
    f.engine("late")
    assert [c.version for c in carries(f)] == [second.version]
    with pytest.raises(e.UpdateInProgress):
        keep(f, first.version.number, "late")


# ---- dry runs, costs, what is kept for people ----


def test_a_dry_run_says_who_stays_and_whose_engine_does_not_run() -> None:
    f, engines, update = served(("e0", "e1", "eval"))
    keep(f, update.version.number)
    f.report(engines["e1"], "e1", life=Life.STOPPING)
    f.now += TTL
    assert ask(f).left_out == (("e1", "its engine is stopping"), ("eval", f"it stays at version {update.version}"))


def test_a_dry_run_has_nothing_to_say_of_a_unit_that_is_whole() -> None:
    f = Fleet()
    for name in ("p", "d"):
        f.engine(name, unit="pair", unit_size=2)
    trainer(f)
    assert not [note for note in ask(f).notes if "unit" in note]


def test_a_streaming_engine_stages_two_chunks_at_most() -> None:
    place = EnginePlace(EngineId("e"), Incarnation("i"), "e:1", "host", (DeviceUuid("d"),), streaming=True)
    load = Load(tensor_count=9, byte_count=1000, chunk_bytes=100, largest_module_bytes=300)
    made = make_plan(1, [place], frozenset(), [RankPlace(Rank(0), "other", DeviceUuid("r"))])
    staged, streamed = (
        engine_costs(Plan(1, (replace(made.assignments[0], transport=Transport.INLINE, apply=apply),)), load)[0]
        for apply in (Apply.STAGED, Apply.STREAMING)
    )
    assert isinstance(made.assignments[0], Assignment)
    assert (staged.staging_bytes, streamed.staging_bytes) == (1000, 200)


def test_stacks_of_the_updates_that_were_told_of_first_make_room() -> None:
    shelf = StackShelf()
    for number in range(MAX_UPDATES + 1):
        shelf.put(UpdateId(f"u{number}"), [ProcessStacks("rank 0", 7, "at work")], 1.0)
    assert shelf.get(UpdateId("u0"), 1.0).processes == ()
    assert shelf.get(UpdateId("u1"), 1.0).processes


def test_inv7_an_accepted_ledger_raises_only_the_terms_that_are_below_what_was_seen() -> None:
    f = Fleet()
    f.handle(hello(1, "c0", model=ModelName("critic")))
    f.handle(hello(2, "e0", term=3, number=9))
    f.handle(events.LedgerAccepted(RUN, "ann"))
    assert (f.core.model(POLICY).term, f.core.model(ModelName("critic")).term) == (4, 0)


def test_held_weights_are_what_makes_an_engine_able_to_stay_without_a_checkpoint() -> None:
    f = Fleet()
    engines = {"e0": f.engine("e0")}
    f.trainer()
    update = f.push("u1", engines)
    f.core.engines[EngineId("e0")].capabilities = ()
    keep(f, update.version.number, "e0")
    assert f.core.kept[EngineId("e0")] == EngineKept(EngineId("e0"), POLICY, update.version, b"d")
    assert f.states["e0"].weights == Held(update.version, b"d")

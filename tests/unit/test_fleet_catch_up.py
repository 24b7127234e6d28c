"""Catch-up, healing and rollback by the coordinator itself, under its own term, from checkpoints."""

from __future__ import annotations

import pytest

from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Poisoned, Progress, Stage, Unset
from controlplane.core.fleet_catch_up import MAX_CHECKPOINTS, RETRY_SECONDS
from controlplane.core.fleet_records import CheckpointGone
from controlplane.core.plan import RankPlace, Transport
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import DeviceUuid, EngineId, Rank, Term, UpdateId, WeightVersion
from tests.support.checkpointed_fleet import carries, kept, publish, served
from tests.support.fleet_core import POLICY, RUN, TTL, Fleet


def test_a_joiner_is_brought_to_the_served_version_without_a_trainer() -> None:
    f, _, update = served()
    f.engine("late")
    assert [(c.engine.engine_id, c.version, c.waits_for_go) for c in carries(f)] == [("late", update.version, False)]
    f.handle(events.Tick())
    assert len(carries(f)) == 1, "one is on its way already"


def test_inv7_also_when_the_version_is_of_an_older_term_and_every_engine_restarts() -> None:
    f, _, update = served()
    f.trainer("t2", takeover=True)
    for name in ("e0", "e1"):
        f.engine(name, incarnation="i2")
    assert {c.engine.engine_id for c in carries(f)} == {"e0", "e1"}
    assert all(c.version == update.version and c.version.term == 1 for c in carries(f))


def test_a_poisoned_engine_is_healed() -> None:
    f, engines, _ = served()
    f.report(engines["e0"], "e0", weights=Poisoned("spans"))
    assert [c.engine.engine_id for c in carries(f)] == ["e0"]


def test_nothing_is_carried_without_a_checkpoint_or_while_an_update_is_open_or_to_who_is_busy() -> None:
    f = Fleet()
    engines = {"e0": f.engine("e0")}
    f.trainer()
    update = f.push("u1", engines)
    f.engine("late")
    assert carries(f) == []
    open_update = f.begin("u2")
    publish(f, update)
    assert carries(f) == []
    f.handle(events.AbortRequested(RUN, open_update.update_id, Term(1), "enough"))
    progress = Progress(UpdateId("another"), open_update.version, Stage.RECEIVING)
    f.report(f.sessions - 1, "late", progress=progress)
    session = f.core.engines[EngineId("late")].session
    assert session is not None
    f.report(session, "late", progress=progress)
    f.effects.clear()
    f.handle(events.Tick())
    assert carries(f) == []
    f.report(session, "late", progress=None)
    assert [c.engine.engine_id for c in carries(f)] == ["late"]


def test_inv5_an_engine_with_a_newer_version_than_the_served_is_left_to_the_next_push() -> None:
    f, engines, _ = served()
    update = f.begin("u2")
    f.stage_all(engines, update, Stage.READY, Stage.INSTALLING)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.stage(engines["e1"], "e1", update, Stage.ABORTED)
    assert update.phase is Phase.FAILED
    f.handle(events.Tick())
    assert carries(f) == []


def test_nobody_is_carried_to_on_devices_that_a_trainer_holds() -> None:
    f = Fleet()
    engines = {"e0": f.engine("e0"), "shared": f.engine("shared", devices=("dev-r0",))}
    trainer = f.trainer(ranks=(RankPlace(Rank(0), "host", DeviceUuid("dev-r0")),))
    update = f.push("u1", engines)
    publish(f, update)
    f.handle(events.TrainerReported(trainer, Term(1), 1, "train", 1, holds_devices=True))
    f.effects.clear()
    f.report(engines["shared"], "shared", weights=Poisoned("spans"))
    f.report(engines["e0"], "e0", weights=Poisoned("spans"))
    assert [c.engine.engine_id for c in carries(f)] == ["e0"]
    f.handle(events.TrainerReported(trainer, Term(1), 1, "rollout", 2, holds_devices=False))
    f.handle(events.Tick())
    assert [c.engine.engine_id for c in carries(f)] == ["e0", "shared"]


def test_agents_are_told_who_has_devices_until_that_one_says_otherwise_or_its_lease_is_over() -> None:
    f = Fleet()
    f.engine("e0")
    trainer, owner = f.trainer(), "trainer:trainer"
    assert f.core.device_holder(POLICY) == owner, "an earlier life of it may have taken them"
    for holds in (False, True):
        effects = f.handle(events.TrainerReported(trainer, Term(1), 1, "train", 1 + holds, holds_devices=holds))
        assert f.core.device_holder(POLICY) == (owner if holds else "")
        assert any(isinstance(x, fx.BroadcastState) for x in effects)
    f.handle(events.SessionEnded(trainer, goodbye=False))
    f.pass_time(f.settings.lease_ttl_seconds / 2)
    assert f.core.device_holder(POLICY) == owner
    f.now += f.settings.lease_ttl_seconds
    assert any(isinstance(x, fx.BroadcastState) for x in f.handle(events.Tick()))
    assert f.core.device_holder(POLICY) == ""


def test_a_trainer_that_is_heard_keeps_its_devices_however_long_it_stands_still() -> None:
    f = Fleet()
    trainer = f.trainer()
    f.handle(events.TrainerReported(trainer, Term(1), 1, "train", 1, holds_devices=True))
    f.pass_time(f.settings.step_limit_seconds + 2 * f.settings.lease_ttl_seconds)
    assert f.core.device_holder(POLICY) == "trainer:trainer"


def test_an_engine_that_reads_no_checkpoints_is_left_to_the_next_push() -> None:
    f, engines, _ = served()
    f.core.engines[EngineId("e0")].capabilities = ("staged",)
    f.report(engines["e0"], "e0", weights=Poisoned("spans"))
    f.handle(events.Tick())
    assert carries(f) == []


def test_a_carry_that_failed_is_tried_again_after_a_growing_pause() -> None:
    f, engines, _ = served()
    f.report(engines["e0"], "e0", weights=Poisoned("spans"))
    pauses = []
    for _ in range(8):
        carry = carries(f)[-1]
        f.handle(events.CarryEnded(carry.update_id, EngineId("e0"), e.CheckpointUnreadable("c", "gone")))
        before, waited = len(carries(f)), 0.0
        while len(carries(f)) == before:
            waited += 0.5
            f.now += 0.5
            f.handle(events.EngineReported(engines["e0"], f.states["e0"], False))
            f.handle(events.Tick())
        pauses.append(waited)
    assert pauses[0] == RETRY_SECONDS[0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == RETRY_SECONDS[1]


def test_a_carrys_end_is_no_report() -> None:
    f, engines, _ = served()
    f.report(engines["e0"], "e0", weights=Unset())
    f.handle(events.CarryEnded(carries(f)[0].update_id, EngineId("e0"), None))
    assert f.core.engines[EngineId("e0")].state.applied is None


def test_a_late_end_of_an_earlier_carry_ends_nothing() -> None:
    f, _, _ = served()
    f.engine("e0", incarnation="i2")
    first = carries(f)[-1]
    f.engine("e0", incarnation="i3")
    second = carries(f)[-1]
    assert first.update_id != second.update_id
    f.handle(events.CarryEnded(first.update_id, EngineId("e0"), None))
    assert f.core.carries[EngineId("e0")] == second


def test_no_more_at_once_than_the_limit() -> None:
    names = tuple(f"e{i}" for i in range(7))
    f, engines, _ = served(names)
    for name, session in engines.items():
        f.report(session, name, weights=Poisoned("spans"))
    assert len(carries(f)) == f.settings.max_carries
    f.handle(events.CarryEnded(carries(f)[0].update_id, carries(f)[0].engine.engine_id, None))
    assert len(carries(f)) == f.settings.max_carries + 1


def test_a_checkpoint_must_be_what_the_fleet_committed() -> None:
    f, _, update = served()
    with pytest.raises(e.VersionConflict):
        f.handle(events.CheckpointPublished(RUN, Term(1), kept(update.version, b"other")))
    with pytest.raises(e.VersionUnavailable):
        f.handle(events.CheckpointPublished(RUN, Term(1), kept(WeightVersion(9, Term(1)))))
    f.trainer("t2", takeover=True)
    with pytest.raises(e.StaleTerm):
        f.handle(events.CheckpointPublished(RUN, Term(1), kept(update.version)))


def test_a_retired_checkpoint_is_not_brought() -> None:
    f, engines, update = served()
    f.handle(events.CheckpointRetired(RUN, POLICY, Term(1), update.version.number))
    f.handle(events.CheckpointRetired(RUN, POLICY, Term(1), update.version.number))
    f.report(engines["e0"], "e0", weights=Poisoned("spans"))
    assert carries(f) == []
    with pytest.raises(e.CheckpointUnknown):
        f.handle(events.RollbackRequested(UpdateId("r"), "r", RUN, POLICY, update.version.number))


def test_old_checkpoints_are_forgotten_but_not_the_served() -> None:
    f, engines, _ = served()
    for i in range(MAX_CHECKPOINTS + 3):
        publish(f, f.push(f"more{i}", engines))
    numbers = list(f.core.model(POLICY).checkpoints)
    assert len(numbers) == MAX_CHECKPOINTS
    assert f.served[0].number in numbers
    assert sum(isinstance(x, fx.Save) and isinstance(x.record, CheckpointGone) for x in f.effects) == 4


# ---- rollback ----


def test_inv5_a_rollback_is_a_new_number_that_names_what_it_restores() -> None:
    f, engines, first = served()
    f.push("u2", engines)
    effects = f.handle(events.RollbackRequested(UpdateId("back"), "back", RUN, POLICY, first.version.number))
    update = next(x.update for x in effects if isinstance(x, fx.UpdatePlanned))
    assert (update.version.number, update.restores) == (3, first.version)
    assert all(a.transport is Transport.CHECKPOINT and not a.ranks for a in update.plan.assignments)
    assert [(c.waits_for_go, c.version) for c in carries(f)] == [(True, update.version)] * 2
    f.stage_all(engines, update, Stage.READY, Stage.INSTALLING, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.COMMITTED, (update.version,))
    third = f.push("u3", engines)
    assert third.version.number == 4


def test_a_rollback_waits_for_nobodys_update_and_is_fenced_by_recovery() -> None:
    f, _, first = served()
    f.begin("u2")
    with pytest.raises(e.UpdateInProgress):
        f.handle(events.RollbackRequested(UpdateId("back"), "back", RUN, POLICY, first.version.number))
    again = Fleet(f.ledger)
    with pytest.raises(e.CoordinatorRecovering):
        again.handle(events.RollbackRequested(UpdateId("back"), "back", RUN, POLICY, first.version.number))


def test_checkpoints_survive_the_coordinator() -> None:
    f, _, update = served()
    again = Fleet(f.ledger)
    for name in ("e0", "e1"):
        again.engine(name, incarnation="i2")
    again.pass_time(TTL)
    assert {c.engine.engine_id for c in carries(again)} == {"e0", "e1"}
    assert all(c.version == update.version for c in carries(again))

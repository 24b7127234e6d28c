"""What the simulator found in the cores about sleep, lent devices, carries and rollbacks, each at its smallest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_effects
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import Held, Residency, Stage
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId, Term, UpdateId
from tests.sim.scenes import RANKS, asleep, hello, kept, lent
from tests.support.fleet_core import POLICY, RUN, TTL, Fleet, two_engines


def test_a_sleep_that_comes_while_a_wake_is_under_way_is_carried_out() -> None:
    """Else it would say that it sleeps, and have the devices for ever."""
    agent = asleep()
    agent.handle(ee.WakeRequested("ann", kv=True))
    assert fx.StartSleep(1) in agent.handle(ee.SleepRequested("ann", 1))


def test_the_end_of_a_wake_that_a_sleep_followed_is_not_the_end_of_the_next_wake() -> None:
    agent = asleep()
    agent.handle(ee.WakeRequested("ann", kv=True))
    agent.handle(ee.SleepRequested("ann", 1))
    agent.handle(ee.WakeRequested("ann", kv=True))
    agent.handle(ee.Woke(kv=True))
    assert agent.core.state.residency is Residency.ASLEEP
    agent.handle(ee.Woke(kv=True))
    assert agent.core.gate_open


def test_a_wake_in_two_steps_that_are_asked_for_at_once_ends_awake() -> None:
    agent = asleep()
    for kv in (False, True):
        agent.handle(ee.WakeRequested("ann", kv=kv))
    for kv in (False, True):
        agent.handle(ee.Woke(kv=kv))
    assert agent.core.gate_open


def test_two_owners_of_a_sleep_do_not_keep_each_other_from_ending_it() -> None:
    agent = asleep()
    agent.handle(ee.SleepRequested("bob", 1))
    assert not [x for x in agent.handle(ee.WakeRequested("ann", kv=True)) if isinstance(x, fx.StartWake)]
    with pytest.raises(e.DevicesTaken):  # her word ended her own hold; his stays
        agent.handle(ee.WakeRequested("ann", kv=True))
    assert fx.StartWake(kv=True) in agent.handle(ee.WakeRequested("bob", kv=True))
    agent.handle(ee.Woke(kv=True))
    assert agent.core.gate_open


def carried(f: Fleet) -> list[str]:
    return [x.carry.engine.engine_id for x in f.effects if isinstance(x, fleet_effects.StartCarry)]


def test_inv7_a_restarted_coordinator_does_not_take_devices_for_free_before_their_holder_spoke() -> None:
    f, update, _ = lent()
    again = Fleet(f.ledger)
    again.now = f.now
    held = replace(f.states["e1"], weights=Held(update.version, b"d"))
    again.engine("e0", incarnation="i2")
    again.handle(hello(held))
    trainer = again.trainer(held=1, ranks=RANKS)
    again.handle(fe.Tick())
    assert carried(again) == []
    again.handle(fe.TrainerReported(trainer, Term(1), 1, "train", 2, holds_devices=False))
    again.handle(fe.Tick())
    assert carried(again) == ["e0"]


def test_a_restarted_coordinator_heals_once_the_lease_of_a_silent_trainer_ran_out() -> None:
    f, update, _ = lent()
    again = Fleet(f.ledger)
    again.engine("e0", incarnation="i2")
    again.handle(hello(replace(f.states["e1"], weights=Held(update.version, b"d"))))
    again.now = TTL - 1
    again.engine("e0", incarnation="i2")
    assert carried(again) == []
    again.pass_time(2)
    assert carried(again) == ["e0"]


def test_inv7_a_rollback_does_not_go_to_devices_that_a_trainer_holds() -> None:
    f, update, _ = lent()
    f.handle(fe.RollbackRequested(UpdateId("r"), "r", RUN, POLICY, update.version.number))
    assert carried(f) == ["e1"]


def test_what_a_rollback_brought_back_is_carried_from_the_checkpoint_that_it_lay_in() -> None:
    f, engines = two_engines()
    first = f.push("u1", engines)
    f.handle(fe.CheckpointPublished(RUN, Term(1), kept(first)))
    f.handle(fe.RollbackRequested(UpdateId("r"), "r", RUN, POLICY, first.version.number))
    rollback = f.core.updates[UpdateId("r")]
    f.stage_all(engines, rollback, Stage.READY, Stage.INSTALLING, Stage.APPLIED)
    for name in engines:
        f.handle(fe.CarryEnded(UpdateId("r"), f.states[name].engine_id, None))
    assert (rollback.phase, f.served) == (Phase.COMMITTED, (rollback.version,))
    f.effects.clear()
    f.engine("e0", incarnation="i2")
    carries = [x.carry for x in f.effects if isinstance(x, fleet_effects.StartCarry)]
    assert [(c.version, c.checkpoint.name) for c in carries] == [(rollback.version, "policy-1")]


def test_a_rollback_does_not_wait_for_an_engine_that_refused_it() -> None:
    """It will not report what it never took; and nobody can push meanwhile."""
    f, engines = two_engines()
    first = f.push("u1", engines)
    f.handle(fe.CheckpointPublished(RUN, Term(1), kept(first)))
    f.handle(fe.RollbackRequested(UpdateId("r"), "r", RUN, POLICY, first.version.number))
    rollback = f.core.updates[UpdateId("r")]
    refused = e.EngineAsleep(engine_id="e1", missing="the KV cache is")
    f.handle(fe.CarryEnded(UpdateId("r"), EngineId("e1"), refused))
    assert rollback.phase is Phase.FAILED
    assert "KV cache" in rollback.cause

"""Sleep and waking, at the word of people."""

from __future__ import annotations

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.engine_state import Residency, Stage, WeightsKind
from controlplane.core.update_transaction import Phase
from controlplane.sim.scenarios.stage import (
    checkpoint,
    expect,
    go_on,
    life,
    next_decision,
    next_update,
    nothing,
    pass_time,
    refuses,
    rest,
    scenario,
    serve,
    served,
)
from controlplane.sim.world import World


@scenario()
def an_engine_that_slept_deep_claims_nothing_and_is_given_its_version_again(world: World) -> None:
    """Level 2 keeps nothing: unset from the word on, and after the wake the checkpoint is its way back."""
    serve(world)
    checkpoint(world)
    one, before = life(world, "e1"), served(world)
    one.work.sleep(ee.SleepRequested("ann", 2), nothing)
    expect(world, one.core.state.applied is None and not one.core.gate_open, "nothing is claimed")
    pass_time(world, 3.0)
    expect(world, one.core.state.residency is Residency.ASLEEP, "nobody wakes it")
    refuses(world, e.DevicesTaken, lambda: one.work.wake(ee.WakeRequested("bob", True), nothing))
    one.work.wake(ee.WakeRequested("ann", True), nothing)
    world.run_until(lambda: one.open, 10.0, "it serves again")
    expect(world, one.core.state.applied in before and served(world) == before, "what was served before")
    go_on(world)
    world.settle()


@scenario()
def a_poisoned_engine_sleeps_at_either_level(world: World) -> None:
    """Poison stays with the weights that are kept aside, and goes with those that are dropped."""
    serve(world)
    rest(world)
    one = life(world, "e1")
    one.requests.disagree()
    for level, after in ((1, WeightsKind.POISONED), (2, WeightsKind.UNSET)):
        one.work.sleep(ee.SleepRequested("ann", level), nothing)
        pass_time(world, 1.0)
        expect(world, one.core.state.weights_kind is after, f"after level {level}: {one.core.state.weights}")
        for kv in (False, True):
            one.work.wake(ee.WakeRequested("ann", kv), nothing)
        pass_time(world, 1.0)
        expect(world, not one.open, "it serves nothing")
    one.work.sleep(ee.SleepRequested("ann", 1), nothing)
    pass_time(world, 1.0)
    one.work.wake(ee.WakeRequested("ann", False), nothing)
    pass_time(world, 1.0)
    one.work.sleep(ee.SleepRequested("ann", 1), nothing)
    go_on(world)
    world.settle()


@scenario()
def an_engine_that_slept_lightly_serves_what_it_held(world: World) -> None:
    """Level 1 keeps the weights aside; in two steps the gate opens only with the second."""
    serve(world)
    rest(world)
    one, before = life(world, "e1"), life(world, "e1").core.state.weights
    one.work.sleep(ee.SleepRequested("ann", 1), nothing)
    pass_time(world, 1.0)
    one.work.wake(ee.WakeRequested("ann", False), nothing)
    pass_time(world, 1.0)
    expect(world, one.core.state.residency is Residency.WEIGHTS and not one.core.gate_open, "no KV cache, no gate")
    one.work.wake(ee.WakeRequested("ann", True), nothing)
    world.run_until(lambda: one.open, 5.0, "it serves again")
    expect(world, one.core.state.weights == before, "what it held before")
    go_on(world)
    world.settle()


@scenario()
def a_sleep_comes_while_a_wake_is_under_way(world: World) -> None:
    """The later word counts: the devices are free in the end, and are said to be."""
    serve(world)
    rest(world)
    one = life(world, "e1")
    one.work.sleep(ee.SleepRequested("ann", 1), nothing)
    pass_time(world, 1.0)
    one.work.wake(ee.WakeRequested("ann", True), nothing)
    one.work.sleep(ee.SleepRequested("ann", 1), nothing)
    pass_time(world, 2.0)
    expect(world, one.core.state.residency is Residency.ASLEEP, "it says that it sleeps")
    expect(world, one.engine.residency is Residency.ASLEEP, "and it does")
    go_on(world)
    world.settle()


@scenario()
def a_wake_a_sleep_and_a_wake_in_one_moment(world: World) -> None:
    """The first wake's end is not the second's: in between nothing is said to be awake."""
    serve(world)
    rest(world)
    one = life(world, "e1")
    one.work.sleep(ee.SleepRequested("ann", 1), nothing)
    pass_time(world, 1.0)
    one.work.wake(ee.WakeRequested("ann", True), nothing)
    one.work.sleep(ee.SleepRequested("ann", 1), nothing)
    one.work.wake(ee.WakeRequested("ann", True), nothing)
    world.run_until(lambda: one.open, 5.0, "it serves again")
    go_on(world)
    world.settle()


@scenario()
def a_wake_in_two_steps_that_are_asked_for_at_once(world: World) -> None:
    """Both are done: the weights, then the KV cache."""
    serve(world)
    rest(world)
    one = life(world, "e1")
    one.work.sleep(ee.SleepRequested("ann", 1), nothing)
    pass_time(world, 1.0)
    for kv in (False, True):
        one.work.wake(ee.WakeRequested("ann", kv), nothing)
    world.run_until(lambda: one.open, 5.0, "it serves again")
    go_on(world)
    world.settle()


@scenario()
def an_engine_falls_asleep_in_mid_receive(world: World) -> None:
    """Its update ends and cost nothing; the next one is made without it, and a later one heals it."""
    serve(world)
    world.faults.slow_checks("e1", 0.5)
    update = next_update(world)
    one = life(world, "e1")

    def receives() -> bool:
        progress = one.core.state.progress
        return progress is not None and (progress.update_id, progress.stage) == (update.update_id, Stage.RECEIVING)

    world.run_until(receives, 10.0, "e1 receives", look_seconds=0.0)
    one.work.sleep(ee.SleepRequested("ann", 1), nothing)
    world.run_until(lambda: update.phase.final, 20.0, "it is decided")
    expect(world, update.phase is Phase.FAILED and "ENGINE_ASLEEP" in update.cause, update.cause)
    world.faults.slow_checks("e1", 0.0)
    update = next_decision(world)
    expect(world, update.phase is Phase.COMMITTED and "e1" not in update.outcomes, f"{update.outcomes.keys()}")
    world.settle()

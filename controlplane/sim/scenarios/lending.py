"""Devices that a trainer and engines share: who sleeps while the other works, and who wakes whom."""

from __future__ import annotations

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.engine_state import HoldKind, Poisoned, Residency
from controlplane.core.names import trainer_owner
from controlplane.core.versions import DeviceTurn
from controlplane.sim.agent import Agent
from controlplane.sim.engine import MIXTURE, InstallEnding
from controlplane.sim.scenarios.stage import (
    checkpoint,
    expect,
    go_on,
    life,
    next_decision,
    nothing,
    pass_time,
    refuses,
    rest,
    scenario,
    serve,
    team,
    trainer,
)
from controlplane.sim.world import World


@scenario(lends=True)
def nobody_carries_to_devices_that_a_trainer_holds(world: World) -> None:
    """An engine that restarts on lent devices stays unset until they are given back, over the coordinator's restart
    too; then the checkpoint heals it."""
    serve(world)
    checkpoint(world)
    mine, agent = trainer(world), team(world).shared[0]
    _lend_all(world)
    agent.crash()
    world.run_until(lambda: agent.up and agent.present.notes.welcomed, 10.0, "it is back")
    pass_time(world, 3.0)
    world.coordinator.crash()
    pass_time(world, 6.0)
    expect(world, agent.present.core.state.applied is None, "nobody healed it")
    mine.devices.give(nothing)
    world.run_until(world.well, 20.0, "the checkpoint heals it")
    go_on(world)
    world.settle()


@scenario(lends=True)
def a_rollback_goes_around_devices_that_a_trainer_holds(world: World) -> None:
    """Who is on them is left behind, and takes part again once they are given back."""
    serve(world)
    kept = checkpoint(world)
    mine, agent = trainer(world), team(world).shared[0]
    _lend_all(world)
    agent.crash()
    world.run_until(lambda: agent.up and agent.present.notes.welcomed, 10.0, "it is back")
    world.people.roll_back(team(world), kept.version.number)
    update = next_decision(world)
    expect(world, update.committed and agent.engine_id not in update.outcomes, f"{update}")
    mine.devices.give(nothing)
    go_on(world)
    world.settle()


@scenario(lends=True)
def an_engine_that_died_asleep_is_replaced_when_its_devices_are_given(world: World) -> None:
    """By its owner's word, in whichever of its lives; nobody starts an engine on them before."""
    serve(world)
    rest(world)
    _lend_all(world)
    agent, mine = team(world).shared[0], trainer(world)
    lives = agent.lives
    agent.present.die("killed")
    pass_time(world, 3.0)
    refuses(world, e.EngineNotReady, lambda: agent.present.work.wake(ee.WakeRequested("ann", True), nothing))
    pass_time(world, 3.0)
    expect(world, agent.lives == lives, "no fresh engine")
    mine.crash()
    go_on(world)
    world.run_until(lambda: agent.lives > lives, 20.0, "its next life gives them back")
    world.settle()


@scenario(lends=True)
def a_trainer_dies_while_it_holds_devices(world: World) -> None:
    """Its next life, under its name, wakes what sleeps for it."""
    serve(world)
    rest(world)
    _lend_all(world)
    trainer(world).crash()
    go_on(world)
    world.settle()


@scenario(lends=True)
def a_trainer_dies_before_it_wakes_its_engines(world: World) -> None:
    """And once more in its next life, between two of them: the one after that wakes them."""
    serve(world)
    rest(world)
    _lend_all(world)
    mine, lives = trainer(world), trainer(world).lives
    for _ in range(2):
        world.faults.arm("trainer.before_wake", mine.name)
        go_on(world)
        world.run_until(lambda: not mine.up, 20.0, "it dies", look_seconds=0.0)
        world.run_until(lambda: mine.up, 10.0, "it is back", look_seconds=0.0)
    expect(world, mine.lives > lives, f"{mine.lives} lives")
    world.settle()


@scenario(lends=True)
def a_late_sleep_of_a_trainers_dead_life_moves_no_engine(world: World) -> None:
    """Nor does one that the same life went past; nor a late wake, which would bring an engine onto devices that the
    next life has taken (INV-7)."""
    serve(world)
    rest(world)
    _lend_all(world)
    mine, agent = trainer(world), team(world).shared[0]
    owner, before = trainer_owner(mine.name), mine.term
    mine.crash()
    world.run_until(lambda: mine.term > before and not mine.devices.busy, 20.0, "its next life gives them back")
    world.run_until(lambda: _sleeping(world) == 0, 10.0, "its engines are awake")
    one = agent.present
    late = DeviceTurn(before, 99)
    refuses(world, e.StaleTerm, lambda: one.work.sleep(ee.SleepRequested(owner, 1, late), nothing))
    _lend_all(world)
    refuses(world, e.StaleTerm, lambda: one.work.wake(ee.WakeRequested(owner, True, late), nothing))
    past = DeviceTurn(mine.term, 1)
    refuses(world, e.StaleTurn, lambda: one.work.wake(ee.WakeRequested(owner, True, past), nothing))
    expect(world, _sleeping(world) == len(team(world).shared), "the devices are the trainer's")
    mine.devices.give(nothing)
    world.run_until(lambda: _sleeping(world) == 0 and not mine.devices.busy, 10.0, "its engines are awake")
    refuses(world, e.StaleTurn, lambda: one.work.sleep(ee.SleepRequested(owner, 2, past), nothing))
    go_on(world)
    world.settle()


@scenario(lends=True)
def two_put_an_engine_to_sleep_and_each_wakes_it(world: World) -> None:
    """Each one's word ends its own hold, and the last one's wakes it, in either order."""
    serve(world)
    rest(world)
    one = life(world, "e1")
    for first, second in (("ann", "bob"), ("bob", "ann")):
        for owner in ("ann", "bob"):
            one.work.sleep(ee.SleepRequested(owner, 1), nothing)
        pass_time(world, 1.0)
        one.work.wake(ee.WakeRequested(first, True), nothing)
        pass_time(world, 1.0)
        expect(world, one.engine.residency is Residency.ASLEEP, f"it sleeps for {second}")
        one.work.wake(ee.WakeRequested(second, True), nothing)
        world.run_until(lambda: one.open, 5.0, "it serves again")
    go_on(world)
    world.settle()


@scenario(lends=True)
def a_trainer_is_fenced_while_it_holds_devices(world: World) -> None:
    """Nobody starts it again, and its successor has another name: a person wakes what slept for it."""
    serve(world)
    rest(world)
    zombie = trainer(world)
    _lend_all(world)
    zombie.pause()
    team(world).new_trainer(takeover=True)
    pass_time(world, 3.0)
    expect(world, _sleeping(world) == len(team(world).shared), "its successor wakes nothing")
    go_on(world)
    zombie.resume()
    world.run_until(lambda: zombie.fenced, 10.0, "it is fenced")
    world.settle()


@scenario(lends=True)
def a_push_beside_the_trainer_is_served_when_its_devices_are_given(world: World) -> None:
    """Installed without a KV cache: held, and shut until the canary spoke. One that found fault is poison."""
    serve(world)
    rest(world)
    _lend_all(world)
    mine, agents = trainer(world), team(world).shared
    world.faults.next_installs(agents[0].name, InstallEnding.CANARY)
    mine.push_beside()
    world.run_until(lambda: all(_unproven(a) for a in agents), 20.0, "they hold it", look_seconds=0.0)
    expect(world, not any(a.present.open for a in agents), "nobody serves it yet")
    pass_time(world, 2.0)
    mine.devices.give(nothing)
    one = agents[0].present
    world.run_until(
        lambda: isinstance(one.core.state.weights, Poisoned), 10.0, "a canary finds fault", look_seconds=0.0
    )
    go_on(world)
    world.settle()


@scenario(lends=True)
def an_install_beside_the_trainer_heals_a_poisoned_engine(world: World) -> None:
    """Poison that came in its middle goes with what was there before."""
    serve(world)
    rest(world)
    _lend_all(world)
    mine, agent = trainer(world), team(world).shared[0]
    world.faults.slow_installs(agent.name, 1.0)
    mine.push_beside()
    one = agent.present
    world.run_until(lambda: one.engine.content == MIXTURE, 20.0, "it installs", look_seconds=0.0)
    one.requests.disagree()
    world.run_until(lambda: _unproven(agent), 10.0, "the install heals it", look_seconds=0.0)
    pass_time(world, 2.0)
    mine.devices.give(nothing)
    go_on(world)
    world.settle()


def _unproven(agent: Agent) -> bool:
    return agent.present.core.state.held_by(HoldKind.UNPROVEN) is not None


def _sleeping(world: World) -> int:
    return sum(a.present.engine.residency is Residency.ASLEEP for a in team(world).shared)


def _lend_all(world: World) -> None:
    """The trainer holds its devices, its engines sleep, and the coordinator knows."""
    mine = trainer(world)
    mine.devices.take(nothing)

    def lent() -> bool:
        held = world.coordinator.core.trainers[mine.model].holds_devices
        return held and _sleeping(world) == len(team(world).shared)

    world.run_until(lent, 10.0, "its engines sleep")
    pass_time(world, 2.0)

"""Catch-up and rollback from checkpoints; engines that are slower than the steps."""

from __future__ import annotations

from controlplane.core import engine_events as ee
from controlplane.core.engine_state import HoldKind
from controlplane.core.update_transaction import Phase
from controlplane.sim.engine import InstallEnding
from controlplane.sim.scenarios.stage import (
    checkpoint,
    decided,
    expect,
    go_on,
    life,
    next_decision,
    next_update,
    nothing,
    pass_time,
    rest,
    scenario,
    serve,
    served,
    shipped,
    team,
    trainer,
    until_quiet,
)
from controlplane.sim.settings import POLICY
from controlplane.sim.world import World

BOUND_SECONDS = 30.0


@scenario()
def a_joiner_slower_than_the_steps_is_waited_for(world: World) -> None:
    """Each push decides before it is ready, so that go waits for it at last: it serves within a bound."""
    serve(world)
    world.faults.slow_checks("e2", 1.3)
    world.agents["e2"].crash()
    world.run_until(lambda: world.agents["e2"].up and life(world, "e2").notes.welcomed, 10.0, "e2 is back")
    world.run_until(lambda: life(world, "e2").open, BOUND_SECONDS, "e2 serves")
    world.faults.slow_checks("e2", 0.0)
    world.settle()


@scenario(counts={POLICY: 7})
def a_checkpoint_heals_a_fleet_whose_trainer_is_gone(world: World) -> None:
    """Every engine restarts, the served version is of an older term than the model's, and no push will come."""
    serve(world)
    checkpoint(world)
    before = served(world)
    _another_trainer_takes_over_and_is_gone(world)
    for agent in world.agents.values():
        agent.crash()
    world.run_until(lambda: not any(a.up for a in world.agents.values()), 5.0, "they are gone", look_seconds=0.0)
    world.run_until(world.well, 20.0, "the checkpoint heals them")
    expect(world, served(world) == before, f"{before} was served, now {served(world)}")
    expect(world, all(v.term < world.coordinator.core.model(POLICY).term for v in before), "of an older term")
    _it_comes_back(world)
    world.settle()


@scenario()
def a_catch_up_yields_to_a_newer_push(world: World) -> None:
    """It has not begun to install: the push ends it, and the engine is given the newer version."""
    serve(world)
    checkpoint(world)
    world.faults.slow_checks("e2", 1.5)
    world.agents["e2"].crash()
    world.run_until(lambda: _carried(world, "e2"), 15.0, "a catch-up is under way", look_seconds=0.0)
    go_on(world)
    update = next_update(world)
    world.run_until(lambda: life(world, "e2").core.state.progress.update_id == update.update_id, 5.0, "it yields")  # type: ignore[union-attr]
    expect(world, not life(world, "e2").core.state.installing, "nothing was installed of it")
    world.faults.slow_checks("e2", 0.0)
    world.settle()


@scenario()
def a_push_waits_for_a_catch_up_that_installs(world: World) -> None:
    """An install that began runs to its end; then the push goes on with that engine too."""
    serve(world)
    kept = checkpoint(world)
    world.faults.slow_installs("e2", 2.0)
    world.agents["e2"].crash()
    world.run_until(lambda: life(world, "e2").core.state.installing, 15.0, "a catch-up installs", look_seconds=0.0)
    go_on(world)
    update = next_update(world)
    expect(world, life(world, "e2").core.state.installing, "it still installs")
    one = life(world, "e2")
    world.run_until(lambda: one.core.state.applied == kept.version, 5.0, "the catch-up ended well", look_seconds=0.0)
    world.faults.slow_installs("e2", 0.0)

    def newer() -> bool:
        applied = one.core.state.applied
        return applied is not None and applied.number >= update.version.number

    world.run_until(newer, 10.0, "and a push came after it")
    world.settle()


@scenario()
def a_rollback_is_a_new_number(world: World) -> None:
    """What a version held comes back under a higher number, once, though the request comes twice."""
    serve(world)
    kept = checkpoint(world)
    go_on(world)
    next_decision(world)
    until_quiet(world)
    team(world).rests = True
    until_quiet(world)
    before = served(world)
    world.people.roll_back(team(world), kept.version.number, twice=True)
    update = next_decision(world)
    expect(world, update.phase is Phase.COMMITTED and update.restores == kept.version, f"{update.phase} {update.cause}")
    expect(world, served(world) == (update.version,) and min(served(world)) > max(before), f"{served(world)}")
    world.run_until(world.well, 5.0, "it is served")
    digests = {a.present.engine.content for a in world.agents.values()}
    expect(world, digests == {kept.content_digest}, "it is what the old version was")
    pass_time(world, 3.0)
    expect(world, world.coordinator.ledger.kept.requests[update.request_id] == 1, "one number for one request")
    go_on(world)
    world.settle()


@scenario()
def after_a_rollback_the_checkpoint_still_heals(world: World) -> None:
    """The version that came back lies in the checkpoint of the one that it restores."""
    serve(world)
    kept = checkpoint(world)
    _another_trainer_takes_over_and_is_gone(world)
    world.people.roll_back(team(world), kept.version.number)
    update = next_decision(world)
    expect(world, update.phase is Phase.COMMITTED, f"{update.phase} {update.cause}")
    for name in ("e1", "e2"):
        world.agents[name].crash()
    world.coordinator.crash()
    world.run_until(lambda: not world.agents["e1"].up, 5.0, "they are gone", look_seconds=0.0)
    world.run_until(world.well, 20.0, "the checkpoint heals them")
    expect(world, served(world) == (update.version,), f"{served(world)}")
    _it_comes_back(world)
    world.settle()


@scenario()
def an_install_of_a_rollback_fails(world: World) -> None:
    """As of any update: the others serve it, and the checkpoint heals the one that it touched."""
    serve(world)
    kept = checkpoint(world)
    world.faults.next_installs("e1", InstallEnding.TOUCHED)
    world.people.roll_back(team(world), kept.version.number)
    update = next_decision(world)
    expect(world, update.phase is Phase.DEGRADED and "e1 failed" in update.cause, f"{update.phase} {update.cause}")
    go_on(world)
    world.settle()


@scenario()
def a_rollback_ends_soon_when_an_engine_refuses_it(world: World) -> None:
    """What the engine would not take it will not report either: nobody waits for that until the limit."""
    serve(world)
    kept = checkpoint(world)
    world.people.roll_back(team(world), kept.version.number)
    update, one = next_update(world), life(world, "e1")
    one.work.sleep(ee.SleepRequested("ann", 1), nothing)
    began = world.kernel.now
    decided(world, update)
    expect(world, update.phase is Phase.FAILED and world.kernel.now < began + 4.0, f"{update.phase} {update.cause}")
    one.work.wake(ee.WakeRequested("ann", True), nothing)
    go_on(world)
    world.settle()


@scenario()
def a_rollback_goes_on_without_an_engine_that_drains(world: World) -> None:
    """It refuses what comes, and the others are brought back."""
    serve(world)
    kept = checkpoint(world)
    world.people.roll_back(team(world), kept.version.number)
    update = next_update(world)
    life(world, "e1").hold(HoldKind.DRAINING, "ann", present=True)
    decided(world, update)
    expect(world, update.phase is Phase.COMMITTED, f"{update.phase} {update.cause}")
    expect(world, not update.outcomes[world.agents["e1"].engine_id].required, "e1 is required no more")
    life(world, "e1").hold(HoldKind.DRAINING, "ann", present=False)
    go_on(world)
    world.settle()


@scenario()
def a_checkpoint_is_gone_under_the_coordinators_feet(world: World) -> None:
    """The engine says that it cannot be read; it is tried again more and more seldom, and the next push heals it."""
    serve(world)
    kept = checkpoint(world)
    world.shelf.remove(kept.name)
    world.agents["e2"].crash()
    pass_time(world, 12.0)
    tries = world.coordinator.core.carries_made
    expect(world, 2 <= tries <= 6, f"it was tried {tries} times")
    expect(world, life(world, "e2").core.state.applied is None, "nothing came of it")
    go_on(world)
    world.settle()


@scenario()
def the_coordinator_dies_before_a_carrys_commit(world: World) -> None:
    """The engine's stream ends without one: an abort (INV-3). The next coordinator carries again, under its term."""
    serve(world)
    checkpoint(world)
    world.faults.arm("coordinator.before_carry_commit", "coordinator")
    world.agents["e2"].crash()
    world.run_until(lambda: not world.coordinator.up, 15.0, "it dies", look_seconds=0.0)
    expect(world, not life(world, "e2").core.state.installing, "nothing is installed")
    world.run_until(world.well, 20.0, "it is carried again")
    go_on(world)
    world.settle()


@scenario()
def a_trainer_dies_before_it_tells_of_its_checkpoint(world: World) -> None:
    """A directory that nobody was told of is nobody's: no engine is ever sent there."""
    serve(world)
    rest(world)
    mine = trainer(world)
    world.faults.arm("trainer.before_publish", mine.name)
    mine.publisher.write(shipped(mine), surely=True)
    world.run_until(lambda: not mine.up, 5.0, "it dies", look_seconds=0.0)
    expect(world, bool(world.shelf.names()), "it lies there")
    expect(world, not world.coordinator.core.model(POLICY).checkpoints, "and nobody knows")
    go_on(world)
    world.settle()


@scenario()
def an_agent_dies_while_it_reads_a_checkpoint(world: World) -> None:
    """Its next life is carried to again."""
    serve(world)
    checkpoint(world)
    world.agents["e2"].crash()
    world.faults.arm("engine.mid_read", "e2")
    lives = world.agents["e2"].lives
    world.run_until(lambda: world.agents["e2"].lives == lives + 2, 20.0, "it died once more")
    world.run_until(world.well, 20.0, "it is carried again")
    go_on(world)
    world.settle()


def _carried(world: World, name: str) -> bool:
    progress = life(world, name).core.state.progress
    return progress is not None and progress.update_id.startswith("catch-up")


def _another_trainer_takes_over_and_is_gone(world: World) -> None:
    """The first is fenced, the second never pushes, and nobody starts either again."""
    world.supervisor.launches = False
    second = team(world).new_trainer(takeover=True)
    first = trainer(world)
    world.run_until(lambda: first.fenced and second.term > first.term, 10.0, "the first is fenced")
    second.crash()


def _it_comes_back(world: World) -> None:
    world.supervisor.launches = True
    go_on(world)
    trainer(world).start()

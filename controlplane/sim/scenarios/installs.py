"""Installs that fail, or are disturbed."""

from __future__ import annotations

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.canary import Verification
from controlplane.core.engine_state import HoldKind, Poisoned
from controlplane.core.update_policy import Mode, UpdatePolicy
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import Incarnation
from controlplane.sim.engine import MIXTURE, InstallEnding
from controlplane.sim.scenarios.stage import (
    checkpoint,
    expect,
    go_on,
    life,
    next_decision,
    next_update,
    nothing,
    refuses,
    scenario,
    serve,
    served,
)
from controlplane.sim.settings import POLICY
from controlplane.sim.world import World


@scenario()
def one_of_n_installs_fails_after_go_under_all(world: World) -> None:
    """N − 1 serve the new version, the decision is DEGRADED and names the engine, and the next push heals it."""
    serve(world)
    world.faults.next_installs("e1", InstallEnding.TOUCHED)
    update = next_decision(world)
    expect(world, update.phase is Phase.DEGRADED and "e1 failed" in update.cause, f"{update.phase} {update.cause}")
    expect(world, isinstance(world.agents["e1"].present.core.state.weights, Poisoned), "e1 is poisoned")
    others = [a for a in world.agents.values() if a.name != "e1"]
    world.run_until(lambda: all(a.present.open for a in others), 5.0, "the others serve the new version")
    world.settle()


@scenario()
def one_of_three_equal_engines_says_something_else(world: World) -> None:
    """It is doubted before the version is served: it never opens with it, the others do, and the next push heals it."""
    serve(world)
    before = served(world)
    world.faults.next_installs("e1", InstallEnding.STRANGE)
    one = life(world, "e1")
    update = next_update(world)
    opened = []

    def decided() -> bool:
        opened.extend([one.core.state.applied] if one.core.gate_open and one.core.state.applied not in before else [])
        return update.phase.final

    world.run_until(decided, 20.0, "it is decided", look_seconds=0.0)
    doubted = update.phase is Phase.DEGRADED and "CANARY_DISAGREES" in update.cause
    expect(world, doubted, f"{update.phase} {update.cause}")
    world.run_until(lambda: isinstance(one.core.state.weights, Poisoned), 5.0, "it heeds that", look_seconds=0.0)
    expect(world, not opened, f"its gate opened with {opened}")
    others = [a for a in world.agents.values() if a.name != "e1"]
    world.run_until(lambda: all(a.present.open for a in others), 5.0, "the others serve the new version")
    world.settle()


@scenario(counts={POLICY: 5})
def two_of_five_equal_engines_say_something_else(world: World) -> None:
    """Three are a strict majority of five: both are doubted, whoever spoke first."""
    serve(world)
    for name in ("e1", "e3"):
        world.faults.next_installs(name, InstallEnding.STRANGE)
    update = next_decision(world)
    bad = sorted(o.engine_id for o in update.outcomes.values() if o.error_reason == "CANARY_DISAGREES")
    expect(world, update.phase is Phase.DEGRADED and bad == ["e1", "e3"], f"{update.phase} {update.cause}")
    world.settle()


@scenario(counts={POLICY: 2})
def two_engines_cannot_outvote_each_other(world: World) -> None:
    """Nobody knows who is right: both serve, and nothing is claimed of it."""
    serve(world)
    world.faults.next_installs("e1", InstallEnding.STRANGE)
    update = next_decision(world)
    claims = {o.verification for o in update.outcomes.values()}
    expect(world, update.phase is Phase.COMMITTED and claims == {Verification.UNVERIFIED}, f"{update.phase} {claims}")
    world.settle()


@scenario()
def a_late_joiner_says_something_else_than_those_that_serve(world: World) -> None:
    """Its own canary spoke, so it opens (INV-1); it shuts with the others' word, and is brought the version again."""
    serve(world)
    checkpoint(world)
    world.faults.next_installs("e2", InstallEnding.STRANGE)
    world.agents["e2"].crash()
    world.run_until(lambda: world.agents["e2"].up and life(world, "e2").running, 15.0, "it is back", look_seconds=0.0)
    one = life(world, "e2")
    world.run_until(lambda: isinstance(one.core.state.weights, Poisoned), 15.0, "it heeds them", look_seconds=0.0)
    expect(world, not one.core.gate_open, "its gate is shut")
    world.run_until(lambda: one.open, 15.0, "it is healed by the checkpoint")
    go_on(world)
    world.settle()


@scenario()
def an_install_that_touched_nothing_keeps_the_old_version_served(world: World) -> None:
    """A live engine still holds what is served: the decision is FAILED, and it serves on."""
    serve(world)
    before = served(world)
    world.faults.next_installs("e0", InstallEnding.UNTOUCHED)
    update = next_decision(world)
    expect(world, update.phase is Phase.FAILED and served(world) == before, f"{update.phase}, {served(world)}")
    world.run_until(lambda: world.agents["e0"].present.open, 2.0, "e0 serves on")
    world.settle()


@scenario()
def both_old_and_new_have_no_holder(world: World) -> None:
    """Every install fails after its first byte: nothing is claimed, nothing served, and the next push lights it up."""
    serve(world)
    before = served(world)
    for name in world.agents:
        world.faults.next_installs(name, InstallEnding.TOUCHED)
    update = next_decision(world)
    expect(world, update.phase is Phase.FAILED and served(world) == before, f"{update.phase}, {served(world)}")
    expect(world, not any(a.present.core.state.applied for a in world.agents.values()), "nobody holds anything")
    world.settle()


@scenario()
def every_engine_is_rebuilt_in_mid_install(world: World) -> None:
    """An unknown outcome is a new incarnation, unset."""
    serve(world)
    for name in world.agents:
        world.faults.next_installs(name, InstallEnding.TIMED_OUT)
    update = next_decision(world)
    expect(world, update.phase is Phase.FAILED, f"{update.phase}")
    world.settle()


@scenario()
def an_agent_dies_in_mid_install_and_returns(world: World) -> None:
    """It comes back unset, under the terms that its disk remembers; its old life counts as lost."""
    serve(world)
    world.faults.arm("engine.mid_install", "e1")
    update = next_decision(world)
    expect(world, update.phase is Phase.DEGRADED and "e1 lost" in update.cause, f"{update.phase} {update.cause}")
    world.settle()


@scenario()
def a_stale_wake_and_a_stale_resume_arrive_in_mid_install(world: World) -> None:
    """Nobody's word but the install's own end opens the gate; a sleep waits, a call for another life is refused."""
    serve(world)
    world.faults.slow_installs("e0", 1.0)
    world.run_until(lambda: life(world, "e0").core.state.installing, 10.0, "e0 installs")
    one, agent = life(world, "e0"), world.agents["e0"]
    for kind in (HoldKind.OPERATOR, HoldKind.DRAINING):
        one.hold(kind, "ann", present=False)
    one.work.wake(ee.WakeRequested("ann", True), nothing)
    refuses(world, e.UpdateInProgress, lambda: one.work.sleep(ee.SleepRequested("ann", 1), nothing))
    refuses(world, e.WrongIncarnation, lambda: one.check_meant(Incarnation(f"{agent.name}/0")))
    expect(world, one.core.state.installing and not one.open and not one.core.gate_open, "the gate stays shut")
    world.settle()


@scenario()
def an_agent_leaves_on_purpose(world: World) -> None:
    """Its goodbye is the end of that engine: nobody waits for it, and it may come back as a joiner."""
    serve(world)
    agent, lives = world.agents["e1"], world.agents["e1"].lives
    agent.present.leave()
    world.run_until(lambda: agent.engine_id not in world.coordinator.core.engines, 5.0, "it is forgotten")
    world.run_until(lambda: agent.lives > lives, 10.0, "it is back", look_seconds=0.0)
    agent.present.die("it did not start")
    world.settle()


@scenario()
def spans_disagree_in_mid_install(world: World) -> None:
    """It is poison at once; and what the install brings is a full update, so it heals."""
    serve(world)
    world.faults.slow_installs("e0", 1.0)
    one = life(world, "e0")
    world.run_until(lambda: one.engine.content == MIXTURE, 10.0, "e0 installs", look_seconds=0.0)
    one.requests.disagree()
    expect(world, isinstance(one.core.state.weights, Poisoned), "it is poisoned")
    world.run_until(lambda: one.core.state.applied is not None, 5.0, "the install heals it", look_seconds=0.0)
    world.settle()


@scenario(UpdatePolicy(Mode.ROLLING))
def a_rolling_update_whose_second_engine_fails(world: World) -> None:
    """The first that applied is served beside the old version; the decision is DEGRADED, and never taken back."""
    serve(world)
    world.faults.next_installs("e1", InstallEnding.TOUCHED)
    update = next_update(world)
    world.run_until(lambda: update.rolled, 10.0, "it rolls", look_seconds=0.0)
    expect(world, len(served(world)) == 2 and update.version in served(world), f"served is {served(world)}")
    world.run_until(lambda: update.phase.final, 20.0, "it is decided", look_seconds=0.0)
    expect(world, update.phase is Phase.DEGRADED and served(world) == (update.version,), f"{update.phase}")
    world.settle()


@scenario(UpdatePolicy(quorum=2))
def a_quorum_commits_and_the_failed_one_heals(world: World) -> None:
    """Two of three are enough; the third is named, shut, and healed by the next push."""
    serve(world)
    world.faults.next_installs("e1", InstallEnding.TOUCHED)
    update = next_decision(world)
    expect(world, update.phase is Phase.COMMITTED and "e1 failed" in update.cause, f"{update.phase} {update.cause}")
    world.settle()

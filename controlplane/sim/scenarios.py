"""Interleavings that are worth having every time, each a world of its own.

A scenario starts its world, arranges faults, runs, and checks what must have come of them; the witness checks all the
rest. It raises `Violation`. To add one: write a function of a world, and its decorator lists it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import Poisoned
from controlplane.core.fleet import FleetCore, FleetSettings
from controlplane.core.fleet_records import Recovered
from controlplane.core.plan import EnginePlace
from controlplane.core.update_transaction import Mode, Phase, UpdatePolicy, UpdateTransaction
from controlplane.core.versions import Incarnation, Term, WeightVersion
from controlplane.sim.engine import InstallEnding
from controlplane.sim.push import Push
from controlplane.sim.settings import POLICY
from controlplane.sim.world import World

Script = Callable[[World], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    run: Script
    policy: UpdatePolicy


SCENARIOS: dict[str, Scenario] = {}
QUIET_SECONDS = 20.0
ALL = UpdatePolicy()


def scenario(policy: UpdatePolicy = ALL) -> Callable[[Script], Script]:
    """Lists a script, with the policy that its world's updates have."""

    def listed(script: Script) -> Script:
        SCENARIOS[script.__name__] = Scenario(script, policy)
        return script

    return listed


# ---- installs that fail ----


@scenario()
def one_of_n_installs_fails_after_go_under_all(world: World) -> None:
    """N − 1 serve the new version, the decision is DEGRADED and names the engine, and the next push heals it."""
    _serve(world)
    world.faults.next_installs("e1", InstallEnding.TOUCHED)
    update = _next_decision(world)
    _expect(world, update.phase is Phase.DEGRADED and "e1 failed" in update.cause, f"{update.phase} {update.cause}")
    _expect(world, isinstance(world.agents["e1"].present.core.state.weights, Poisoned), "e1 is poisoned")
    others = [a for a in world.agents.values() if a.name != "e1"]
    world.run_until(lambda: all(a.present.open for a in others), 5.0, "the others serve the new version")
    world.settle()


@scenario()
def an_install_that_touched_nothing_keeps_the_old_version_served(world: World) -> None:
    """A live engine still holds what is served: the decision is FAILED, and it serves on."""
    _serve(world)
    served = world.served
    world.faults.next_installs("e0", InstallEnding.UNTOUCHED)
    update = _next_decision(world)
    _expect(world, update.phase is Phase.FAILED and world.served == served, f"{update.phase}, {world.served}")
    world.run_until(lambda: world.agents["e0"].present.open, 2.0, "e0 serves on")
    world.settle()


@scenario()
def both_old_and_new_have_no_holder(world: World) -> None:
    """Every install fails after its first byte: nothing is claimed, nothing served, and the next push lights it up."""
    _serve(world)
    served = world.served
    for name in world.agents:
        world.faults.next_installs(name, InstallEnding.TOUCHED)
    update = _next_decision(world)
    _expect(world, update.phase is Phase.FAILED and world.served == served, f"{update.phase}, {world.served}")
    _expect(world, not any(a.present.core.state.applied for a in world.agents.values()), "nobody holds anything")
    world.settle()


@scenario()
def every_engine_is_rebuilt_in_mid_install(world: World) -> None:
    """An unknown outcome is a new incarnation, unset."""
    _serve(world)
    for name in world.agents:
        world.faults.next_installs(name, InstallEnding.TIMED_OUT)
    update = _next_decision(world)
    _expect(world, update.phase is Phase.FAILED, f"{update.phase}")
    world.settle()


@scenario()
def an_agent_dies_in_mid_install_and_returns(world: World) -> None:
    """It comes back unset, under the terms that its disk remembers; its old life counts as lost."""
    _serve(world)
    world.faults.arm("engine.mid_install", "e1")
    update = _next_decision(world)
    _expect(world, update.phase is Phase.DEGRADED and "e1 lost" in update.cause, f"{update.phase} {update.cause}")
    world.settle()


@scenario()
def a_stale_resume_arrives_in_mid_install(world: World) -> None:
    """Nobody's word but the install's own end opens the gate; a resume for another life is refused."""
    _serve(world)
    agent = world.agents["e0"]
    world.run_until(lambda: agent.present.core.state.installing, 10.0, "e0 installs")
    life = agent.present
    life.hold("ann", life.core.state.incarnation, present=False)
    life.hold("update", life.core.state.incarnation, present=False)
    life.hold("ann", Incarnation(f"{agent.name}/0"), present=False)
    _expect(world, not life.open and not life.core.gate_open, "the gate stays shut")
    world.settle()


@scenario(UpdatePolicy(Mode.ROLLING))
def a_rolling_update_whose_second_engine_fails(world: World) -> None:
    """The first that applied is served beside the old version; the decision is DEGRADED, and never taken back."""
    _serve(world)
    world.faults.next_installs("e1", InstallEnding.TOUCHED)
    update = _next_update(world)
    world.run_until(lambda: update.rolled, 10.0, "it rolls", look_seconds=0.0)
    _expect(world, len(world.served) == 2 and update.version in world.served, f"served is {world.served}")
    world.run_until(lambda: update.phase.final, 20.0, "it is decided", look_seconds=0.0)
    _expect(world, update.phase is Phase.DEGRADED and world.served == (update.version,), f"{update.phase}")
    world.settle()


@scenario(UpdatePolicy(quorum=2))
def a_quorum_commits_and_the_failed_one_heals(world: World) -> None:
    """Two of three are enough; the third is named, shut, and healed by the next push."""
    _serve(world)
    world.faults.next_installs("e1", InstallEnding.TOUCHED)
    update = _next_decision(world)
    _expect(world, update.phase is Phase.COMMITTED and "e1 failed" in update.cause, f"{update.phase} {update.cause}")
    world.settle()


# ---- links ----


@scenario()
def the_link_breaks_after_the_commit_frame(world: World) -> None:
    """The agents own their installs; the writer comes again, attaches and gets the outcome."""
    _serve(world)
    world.faults.arm("trainer.after_commit", "t0", "cut")
    update = _next_decision(world)
    _expect(world, update.phase in (Phase.COMMITTED, Phase.FAILED), f"{update.phase} {update.cause}")
    world.settle()


@scenario()
def the_same_update_is_opened_twice(world: World) -> None:
    """The later stream starts anew at chunk 0, the older one is ended, one install comes of it."""
    _serve(world)
    push = _next_push(world, lambda push: bool(push.feeds))
    for delay in (0.05, 0.1):
        world.supervisor.after(delay, push.feeds[0].again)
    world.run_until(lambda: push.phase.final, 20.0, "it is decided", look_seconds=0.0)
    world.settle()


# ---- terms ----


@scenario()
def takeover_while_the_served_version_is_of_the_old_term_and_every_engine_restarts(world: World) -> None:
    """The new trainer's first push lights the fleet up; the old one is fenced."""
    _serve(world)
    old = world.trainers[0]
    world.new_trainer(takeover=True)
    for agent in world.agents.values():
        agent.crash()
    world.run_until(lambda: old.fenced, 10.0, "the old trainer is fenced")
    world.settle()
    _expect(world, all(v.term == world.trainers[0].term for v in world.served), f"served is {world.served}")


@scenario()
def a_zombie_wakes_after_its_successor_pushed(world: World) -> None:
    """Stopped with its update ready, taken over, continued: refused by agents and coordinator, and it ends."""
    _serve(world)
    zombie = world.trainers[0]
    _next_push(world, lambda push: bool(push.feeds) and push.phase is Phase.PREPARING)
    zombie.pause()
    successor = world.new_trainer(takeover=True)
    world.run_until(lambda: successor.pushed > 0, 30.0, "the successor's push is committed")
    zombie.resume()
    world.run_until(lambda: zombie.fenced, 10.0, "the zombie is fenced")
    world.settle()


@scenario()
def a_trainer_dies_after_go(world: World) -> None:
    """No commit frame comes: every engine aborts, the decision is FAILED, and the old version is served on."""
    _serve(world)
    world.faults.arm("trainer.before_commit", "t0")
    served = world.served
    update = _next_decision(world)
    _expect(world, update.phase is Phase.FAILED and world.served == served, f"{update.phase}, {world.served}")
    world.settle()


@scenario()
def an_old_coordinators_call_arrives_after_the_new_ones(world: World) -> None:
    """Its words are refused by the agents; and it refuses agents that know a later one."""
    _serve(world)
    old_term = world.coordinator.core.term
    world.coordinator.crash()
    life = world.agents["e0"].present
    world.run_until(lambda: life.core.coordinator_term > old_term, 20.0, "a new coordinator welcomed e0")
    served = life.core.served
    lie = ee.FleetChanged(old_term, life.core.term, frozenset({WeightVersion(99, Term(9))}))
    _refuses(world, e.StaleTerm, lambda: life.apply(lie))
    _expect(world, life.core.served == served, "the old coordinator's served set is not followed")
    core = FleetCore(FleetSettings(world.settings.run_id), Recovered(old_term), world.kernel.now)
    state = life.core.state
    place = EnginePlace(state.engine_id, state.incarnation, "e0", "host", ())
    hello = fe.EngineConnected(1, place, state, True, (), life.core.term, life.core.coordinator_term)
    closed = [x.error for x in core.handle(hello, world.kernel.now) if isinstance(x, fe.CloseSession)]
    _expect(world, [type(error) for error in closed] == [e.StaleTerm] and not core.engines, f"it said {closed}")
    world.settle()


# ---- the coordinator's deaths ----


@scenario()
def the_coordinator_dies_after_go_was_written(world: World) -> None:
    """A restart decides from what engines report."""
    _serve(world)
    update = _next_update(world)
    world.run_until(lambda: update.phase is Phase.GO, 10.0, "go")
    world.coordinator.crash()
    kept = world.coordinator.ledger.kept
    world.run_until(lambda: update.update_id in kept.decided, 20.0, "the update is decided")
    world.settle()


@scenario()
def the_coordinator_dies_before_go(world: World) -> None:
    """An update without go in the ledger is aborted by the restart, and costs nothing."""
    _serve(world)
    update = _next_update(world)
    world.coordinator.crash()
    kept = world.coordinator.ledger.kept
    world.run_until(lambda: update.update_id in kept.decided, 20.0, "the update is decided")
    _expect(world, kept.decided[update.update_id].phase is Phase.FAILED, "it is aborted")
    world.settle()


@scenario()
def a_decision_that_was_not_synced_was_told_to_nobody(world: World) -> None:
    """The coordinator dies between writing and syncing: the restart decides again, from reports."""
    _serve(world)
    update = _next_update(world)
    world.run_until(lambda: update.phase is Phase.GO, 10.0, "go")
    world.faults.arm("coordinator.before_sync", "coordinator")
    world.run_until(lambda: not world.coordinator.up, 10.0, "it dies", look_seconds=0.0)
    _expect(world, update.update_id not in world.coordinator.ledger.kept.decided, "the decision is not on the disk")
    world.settle()


@scenario()
def the_ledger_is_restored_from_an_older_copy_while_agents_restart_too(world: World) -> None:
    """Agents know numbers that the ledger does not: it stays recovering, and gives no number twice."""
    _serve(world)
    backup = world.coordinator.ledger.copy()
    pushed = world.trainers[0].pushed
    world.run_until(lambda: world.trainers[0].pushed >= pushed + 2, 30.0, "two more pushes")
    world.coordinator.crash()
    for agent in world.agents.values():
        agent.crash()
    world.coordinator.ledger.restore(backup)
    world.witness.ledger_restored = True
    began = len(world.coordinator.ledger.kept.began)
    world.run_until(_after(world, QUIET_SECONDS), QUIET_SECONDS + 5.0, "time goes by")
    _expect(world, world.coordinator.core.recovering, "the coordinator says that it is recovering")
    _expect(world, len(world.coordinator.ledger.kept.began) == began, "no update began")
    _expect(world, not any(a.present.open for a in world.agents.values()), "nobody serves what nobody holds")
    world.coordinator.handle(fe.LedgerAccepted(world.settings.run_id, "ann"))
    world.settle()


# ---- help ----


def _serve(world: World) -> None:
    """Start, until every engine serves a version and no update is open."""
    world.start()

    def quiet() -> bool:
        return world.coordinator.core.open_update(POLICY) is None and world.well()

    world.run_until(quiet, 30.0, "a version is served", look_seconds=0.0)


def _next_update(world: World) -> UpdateTransaction:
    def found() -> UpdateTransaction | None:
        return world.coordinator.core.open_update(POLICY)

    world.run_until(lambda: found() is not None, 20.0, "the next update begins", look_seconds=0.0)
    update = found()
    assert update is not None
    return update


def _next_decision(world: World) -> UpdateTransaction:
    """The next update, when it is decided."""
    update = _next_update(world)
    world.run_until(lambda: update.phase.final, 30.0, "it is decided", look_seconds=0.0)
    return update


def _next_push(world: World, what: Callable[[Push], bool]) -> Push:
    """The trainer's push of the next update, once `what` is true of it."""
    trainer = world.trainers[0]
    update = _next_update(world)

    def it_is_so() -> bool:
        push = trainer.push
        return push is not None and push.begun is not None and push.begun.update_id == update.update_id and what(push)

    world.run_until(it_is_so, 10.0, "the push is so far", look_seconds=0.0)
    assert trainer.push is not None
    return trainer.push


def _after(world: World, seconds: float) -> Callable[[], bool]:
    end = world.kernel.now + seconds
    return lambda: world.kernel.now >= end


def _expect(world: World, good: bool, text: str) -> None:
    world.witness.check(good, "scenario", f"{text}; {world.describe()}")


def _refuses(world: World, error: type[e.WeightplaneError], action: Callable[[], object]) -> None:
    try:
        action()
    except error:
        return
    _expect(world, False, f"{error.__name__} was expected")

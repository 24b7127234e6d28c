"""Terms: takeovers, zombies, old coordinators."""

from __future__ import annotations

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import Activity
from controlplane.core.fleet import FleetCore, FleetSettings
from controlplane.core.fleet_records import Recovered
from controlplane.core.plan import EnginePlace
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import Term, WeightVersion
from controlplane.sim.push import Push
from controlplane.sim.scenarios.stage import (
    expect,
    next_decision,
    next_push,
    refuses,
    scenario,
    serve,
    served,
    team,
    trainer,
)
from controlplane.sim.world import World


@scenario()
def takeover_while_the_served_version_is_of_the_old_term_and_every_engine_restarts(world: World) -> None:
    """The new trainer's first push lights the fleet up; the old one is fenced."""
    serve(world)
    old = trainer(world)
    team(world).new_trainer(takeover=True)
    for agent in world.agents.values():
        agent.crash()
    world.run_until(lambda: old.fenced, 10.0, "the old trainer is fenced")
    world.settle()
    expect(world, all(v.term == trainer(world).term for v in served(world)), f"served is {served(world)}")


@scenario()
def a_second_trainer_without_takeover_waits(world: World) -> None:
    """The lease is held; when its holder is fenced by nobody and leaves no word for a time, it may be taken."""
    serve(world)
    first, second = trainer(world), team(world).new_trainer()
    world.run_until(lambda: world.coverage.reasons["LEASE_HELD"] > 0, 10.0, "it is told who holds the lease")
    expect(world, not second.term, "it has no term")
    world.supervisor.launches = False
    first.crash()
    world.run_until(lambda: second.pushed > 0, 20.0, "it pushes")
    expect(world, second.term > first.term, f"{second.term} follows {first.term}")
    world.supervisor.launches = True
    first.start()
    world.settle()


@scenario()
def a_zombie_wakes_after_its_successor_pushed(world: World) -> None:
    """Stopped with its update ready on an engine, taken over, continued: refused by agents and coordinator, and it
    ends."""
    serve(world)
    zombie = trainer(world)

    def ready_somewhere(push: Push) -> bool:
        lives = [agent.present for agent in world.agents.values()]
        return push.phase is Phase.PREPARING and any(x.core.state.activity is Activity.READY for x in lives)

    next_push(world, ready_somewhere)
    zombie.pause()
    successor = team(world).new_trainer(takeover=True)
    world.run_until(lambda: successor.pushed > 0, 30.0, "the successor's push is committed")
    zombie.resume()
    world.run_until(lambda: zombie.fenced, 10.0, "the zombie is fenced")
    world.settle()


@scenario()
def a_trainer_dies_after_go(world: World) -> None:
    """No commit frame comes: every engine aborts, the decision is FAILED, and the old version is served on."""
    serve(world)
    world.faults.arm("trainer.before_commit", "t0")
    before = served(world)
    update = next_decision(world)
    expect(world, update.phase is Phase.FAILED and served(world) == before, f"{update.phase}, {served(world)}")
    world.settle()


@scenario()
def an_old_coordinators_call_arrives_after_the_new_ones(world: World) -> None:
    """Its words are refused by the agents; and it refuses agents that know a later one."""
    serve(world)
    old_term = world.coordinator.core.term
    world.coordinator.crash()
    life = world.agents["e0"].present
    world.run_until(lambda: life.core.coordinator_term > old_term, 20.0, "a new coordinator welcomed e0")
    served = life.core.served
    lie = ee.FleetChanged(old_term, life.core.term, frozenset({WeightVersion(99, Term(9))}))
    refuses(world, e.StaleTerm, lambda: life.apply(lie))
    expect(world, life.core.served == served, "the old coordinator's served set is not followed")
    core = FleetCore(FleetSettings(world.settings.run_id), Recovered(old_term), world.kernel.now)
    state = life.core.state
    place = EnginePlace(state.engine_id, state.incarnation, "e0", "host", ())
    hello = fe.EngineConnected(1, place, state, True, (), life.core.term, life.core.coordinator_term)
    closed = [x.error for x in core.handle(hello, world.kernel.now) if isinstance(x, fx.CloseSession)]
    expect(world, [type(error) for error in closed] == [e.StaleTerm] and not core.engines, f"it said {closed}")
    world.settle()

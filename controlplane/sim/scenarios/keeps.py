"""Engines that stay at a version while the fleet moves on."""

from __future__ import annotations

from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import Poisoned
from controlplane.core.fleet_records import CheckpointKept
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId, ModelName
from controlplane.sim.agent import EngineLife
from controlplane.sim.scenarios.stage import (
    checkpoint,
    decided,
    expect,
    go_on,
    life,
    next_decision,
    next_update,
    pass_time,
    refuses,
    rest,
    scenario,
    serve,
    served,
    trainer,
    until_quiet,
)
from controlplane.sim.settings import POLICY, REFERENCE
from controlplane.sim.world import World


def _keep(world: World, name: str, number: int, model: ModelName = POLICY) -> None:
    world.coordinator.handle(fe.KeepRequested(world.settings.run_id, EngineId(name), model, number))


def _release(world: World, name: str) -> None:
    world.coordinator.handle(fe.ReleaseRequested(world.settings.run_id, EngineId(name)))


def _stays(world: World) -> tuple[EngineLife, CheckpointKept]:
    """e2 at what is served and lies in a checkpoint. Trainers rest."""
    serve(world)
    kept = checkpoint(world)
    _keep(world, "e2", kept.version.number)
    return life(world, "e2"), kept


def _moves_on(world: World) -> None:
    """The others, twice to a newer version; an update is not open then."""
    go_on(world)
    for _ in range(2):
        update = next_decision(world)
        expect(world, update.phase is Phase.COMMITTED and "e2" not in update.outcomes, f"{update.outcomes.keys()}")
    until_quiet(world)


@scenario()
def an_engine_stays_while_the_fleet_moves_on(world: World) -> None:
    """It serves its version, and is asked for nothing; released, it goes with the next push."""
    one, kept = _stays(world)
    _moves_on(world)
    expect(world, one.open and one.core.state.applied == kept.version, "it serves what it did")
    expect(world, kept.version not in served(world), "which the fleet serves no more")
    _release(world, "e2")
    world.run_until(lambda: not one.open, 5.0, "it serves it no more", look_seconds=0.0)
    world.run_until(lambda: one.open and one.core.state.applied in served(world), 20.0, "it goes with the fleet")
    world.settle()


@scenario()
def the_next_life_of_an_engine_that_stays_is_brought_to_its_version(world: World) -> None:
    """From the checkpoint, beside the others' updates, which it takes no part in."""
    _, kept = _stays(world)
    _moves_on(world)
    world.agents["e2"].crash()
    world.run_until(lambda: world.agents["e2"].up and life(world, "e2").open, 20.0, "it serves again")
    expect(world, life(world, "e2").core.state.applied == kept.version, "the version that it stays at")
    expect(world, min(served(world)) > kept.version, "while the fleet is further")
    world.settle()


@scenario()
def an_engine_stays_over_the_coordinators_restart(world: World) -> None:
    """It is in the ledger, also where the engine went meanwhile."""
    _, kept = _stays(world)
    _moves_on(world)
    world.agents["e2"].present.leave()
    world.coordinator.crash()
    world.run_until(lambda: life(world, "e2").running and life(world, "e2").open, 30.0, "it serves again")
    expect(world, life(world, "e2").core.state.applied == kept.version, "the version that it stays at")
    world.settle()


@scenario()
def an_engine_that_stays_is_brought_its_version_while_an_update_is_open(world: World) -> None:
    """It is no part of the update, so neither waits for the other."""
    _, kept = _stays(world)
    _moves_on(world)
    world.faults.slow_checks("e0", 1.5)
    update = next_update(world)
    life(world, "e2").die("killed")
    world.run_until(lambda: life(world, "e2").open, 20.0, "it serves again", look_seconds=0.0)
    expect(world, not update.phase.final, "the update is open still")
    expect(world, life(world, "e2").core.state.applied == kept.version, "the version that it stays at")
    world.faults.slow_checks("e0", 0.0)
    decided(world, update)
    world.settle()


@scenario()
def an_engine_that_stays_is_poisoned_and_healed(world: World) -> None:
    """By its checkpoint, and by no push."""
    one, kept = _stays(world)
    _moves_on(world)
    one.requests.disagree()
    expect(world, isinstance(one.core.state.weights, Poisoned), "it is poisoned")
    world.run_until(lambda: one.open, 20.0, "it serves again")
    expect(world, one.core.state.applied == kept.version, "the version that it stays at")
    world.settle()


@scenario()
def a_keep_that_goes_back_is_refused(world: World) -> None:
    """INV-5: one life never goes below what it applied; its next one may be kept there by name."""
    serve(world)
    kept = checkpoint(world)
    _moves_on_with_all(world)
    rest(world)
    refuses(world, e.StaleVersion, lambda: _keep(world, "e2", kept.version.number))
    world.agents["e2"].present.leave()
    engines = world.coordinator.core.engines
    world.run_until(lambda: EngineId("e2") not in engines, 5.0, "it left", look_seconds=0.0)
    _keep(world, "e2", kept.version.number)
    world.run_until(lambda: world.agents["e2"].up and life(world, "e2").open, 20.0, "it serves")
    expect(world, life(world, "e2").core.state.applied == kept.version, "the older version")
    go_on(world)
    world.settle()


@scenario(counts={POLICY: 4, REFERENCE: 1}, units=True)
def what_cannot_be_kept_is_refused(world: World) -> None:
    """Nothing is written then."""
    serve(world)
    kept = checkpoint(world)
    number = kept.version.number
    refuses(world, e.CheckpointUnknown, lambda: _keep(world, "e0", number + 1000))
    refuses(world, e.InvalidRequest, lambda: _keep(world, "e0", number))
    refuses(world, e.ModelFrozen, lambda: _keep(world, "re0", 0, REFERENCE))
    refuses(world, e.UnknownEngine, lambda: _keep(world, "nobody", number, ModelName("")))
    refuses(world, e.UnknownEngine, lambda: _release(world, "nobody"))
    expect(world, not world.coordinator.ledger.kept.stays, "nobody stays")
    go_on(world)
    world.settle()


@scenario(counts={POLICY: 2}, units=True)
def a_keep_that_was_made_before_its_engine_came_does_not_part_a_unit(world: World) -> None:
    """A unit has one gate: who turns out to be one's member goes with the fleet, as the others do."""
    serve(world)
    kept = checkpoint(world)
    world.agents["e1"].present.leave()
    engines = world.coordinator.core.engines
    world.run_until(lambda: EngineId("e1") not in engines, 5.0, "it left", look_seconds=0.0)
    _keep(world, "e1", kept.version.number)
    go_on(world)
    world.run_until(lambda: max(served(world)) > kept.version, 20.0, "the fleet moves on")
    world.run_until(lambda: life(world, "e0").open and life(world, "e1").open, 20.0, "both serve")
    world.settle()


@scenario()
def a_checkpoint_that_an_engine_stays_at_is_not_retired(world: World) -> None:
    """Its next life needs it; once it is released the checkpoint may go."""
    _, kept = _stays(world)
    go_on(world)
    retired = fe.CheckpointRetired(world.settings.run_id, POLICY, trainer(world).term, kept.version.number)
    refuses(world, e.CheckpointInUse, lambda: world.coordinator.handle(retired))
    _release(world, "e2")
    world.coordinator.handle(retired)
    expect(world, kept.version.number not in world.coordinator.core.model(POLICY).checkpoints, "it is gone")
    world.settle()


@scenario()
def every_engine_stays_and_the_fleet_stands_still(world: World) -> None:
    """A push finds nobody; whoever is released goes on, and the fleet with it."""
    serve(world)
    kept = checkpoint(world)
    for name in world.agents:
        _keep(world, name, kept.version.number)
    go_on(world)
    met = world.coverage.reasons["NO_ENGINES"]
    world.run_until(lambda: world.coverage.reasons["NO_ENGINES"] > met, 20.0, "nobody is left to be updated")
    pass_time(world, 3.0)
    expect(world, all(a.present.open for a in world.agents.values()), "all of them serve")
    _release(world, "e0")
    world.run_until(lambda: max(served(world)) > kept.version, 20.0, "the fleet moves on")
    world.settle()


@scenario()
def who_stays_is_not_a_holder_of_what_is_served(world: World) -> None:
    """It serves what the fleet serves, and is out of the decision: when the others lost it, the update is not FAILED
    for its sake."""
    _stays(world)
    world.faults.slow_installs("e1", 1.0)
    go_on(world)
    update = next_update(world)
    world.run_until(lambda: update.phase is Phase.GO, 10.0, "go", look_seconds=0.0)
    one = life(world, "e1")
    world.run_until(lambda: one.core.state.installing, 10.0, "e1 installs", look_seconds=0.0)
    one.die("killed")
    decided(world, update)
    expect(world, update.phase is Phase.DEGRADED, f"{update.phase} {update.cause}")
    world.faults.slow_installs("e1", 0.0)
    world.settle()


def _moves_on_with_all(world: World) -> None:
    go_on(world)
    next_decision(world)
    until_quiet(world)

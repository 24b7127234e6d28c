"""The coordinator's deaths, and its ledger."""

from __future__ import annotations

from functools import partial

from controlplane.core import fleet_events as fe
from controlplane.core.update_transaction import Phase
from controlplane.ledger import MemoryLedger
from controlplane.sim.disks import Kept
from controlplane.sim.scenarios.stage import (
    expect,
    go_on,
    next_update,
    nothing,
    pass_time,
    rest,
    scenario,
    serve,
    team,
    trainer,
)
from controlplane.sim.settings import CRITIC, POLICY, REFERENCE
from controlplane.sim.world import World

QUIET_SECONDS = 20.0


@scenario()
def the_coordinator_dies_after_go_was_written(world: World) -> None:
    """A restart decides from what engines report."""
    serve(world)
    update = next_update(world)
    world.run_until(lambda: update.phase is Phase.GO, 10.0, "go")
    world.coordinator.crash()
    kept = world.coordinator.ledger.kept
    world.run_until(lambda: update.update_id in kept.decided, 20.0, "the update is decided")
    world.settle()


@scenario()
def the_coordinator_is_stopped_for_longer_than_a_lease(world: World) -> None:
    """Nobody's silence in that time means anything: no engine is lost, no lease runs out."""
    serve(world)
    rest(world)
    term = trainer(world).term
    for _ in range(3):
        world.coordinator.pause()
        pass_time(world, world.settings.lease_ttl * 0.9)
        world.coordinator.resume()
        pass_time(world, 0.1)
        expect(world, all(r.session for r in world.coordinator.core.engines.values()), "every engine is known")
    expect(world, world.coverage.fleet_events["Paused"] >= 3, "it noticed")
    go_on(world)
    world.settle()
    expect(world, trainer(world).term == term, "the lease stands")


@scenario()
def an_engine_that_shares_a_part_of_its_devices_is_refused(world: World) -> None:
    """Some of its devices are a rank's, but not all: no slot can feed it."""
    serve(world)
    world.rogue.misfit()
    world.run_until(lambda: world.coverage.reasons["ENGINE_MISFIT"] > 0, 5.0, "it is refused")
    world.settle()


@scenario()
def the_coordinator_dies_before_go(world: World) -> None:
    """An update without go in the ledger is aborted by the restart, and costs nothing."""
    serve(world)
    update = next_update(world)
    world.coordinator.crash()
    kept = world.coordinator.ledger.kept
    world.run_until(lambda: update.update_id in kept.decided, 20.0, "the update is decided")
    expect(world, kept.decided[update.update_id].phase is Phase.FAILED, "it is aborted")
    world.settle()


@scenario()
def a_decision_that_was_not_synced_was_told_to_nobody(world: World) -> None:
    """The coordinator dies between writing and syncing: the restart decides again, from reports."""
    serve(world)
    update = next_update(world)
    world.run_until(lambda: update.phase is Phase.GO, 10.0, "go")
    world.faults.arm("coordinator.before_sync", "coordinator")
    world.run_until(lambda: not world.coordinator.up, 10.0, "it dies", look_seconds=0.0)
    expect(world, update.update_id not in world.coordinator.ledger.kept.decided, "the decision is not on the disk")
    world.settle()


@scenario()
def a_repeated_begin_after_a_restart_gives_no_second_number(world: World) -> None:
    """Its answer was lost with the coordinator; the same request again is told that it was answered."""
    serve(world)
    world.run_until(lambda: not world.coordinator.core.open_update(POLICY), 10.0, "no update is open", look_seconds=0.0)
    kept = world.coordinator.ledger.kept
    known = set(kept.requests)
    world.faults.arm("coordinator.after_save", "coordinator")
    world.run_until(lambda: not world.coordinator.up, 10.0, "it dies", look_seconds=0.0)
    (request,) = set(kept.requests) - known
    world.run_until(lambda: trainer(world).pushed > 0 and len(kept.requests) > len(known) + 1, 30.0, "a later push")
    expect(world, kept.requests[request] == 1, f"{request} was given {kept.requests[request]} numbers")
    world.settle()


@scenario()
def a_begin_is_repeated_after_its_decision_and_another_restart(world: World) -> None:
    """Nobody knows the plan any more: the request is told that it was answered, and the next one gets a number."""
    serve(world)
    world.run_until(lambda: not world.coordinator.core.open_update(POLICY), 10.0, "no update is open", look_seconds=0.0)
    kept, mine = world.coordinator.ledger.kept, trainer(world)
    known = set(kept.requests)
    world.faults.arm("coordinator.after_save", "coordinator")
    world.run_until(lambda: not world.coordinator.up, 10.0, "it dies", look_seconds=0.0)
    mine.pause()
    world.run_until(lambda: set(kept.decided) == set(kept.began), 10.0, "the update is decided")
    world.coordinator.crash()
    world.run_until(lambda: world.coordinator.up, 10.0, "it is back")
    mine.resume()
    world.run_until(lambda: world.coverage.reasons["REQUEST_REPEATED"] > 0, 20.0, "the request is repeated")
    (request,) = set(kept.requests) - known
    expect(world, kept.requests[request] == 1, f"{request} was given {kept.requests[request]} numbers")
    world.settle()


@scenario()
def the_ledger_cannot_write_a_decision(world: World) -> None:
    """The coordinator ends before it told anybody; its next life decides from reports."""
    serve(world)
    update = next_update(world)
    world.run_until(lambda: update.phase is Phase.GO, 10.0, "go", look_seconds=0.0)
    world.faults.fail_the_ledger()
    world.run_until(lambda: not world.coordinator.up, 10.0, "it ends", look_seconds=0.0)
    expect(world, update.update_id not in world.coordinator.ledger.kept.decided, "the decision is not on the disk")
    world.settle()


# ---- an older copy of the ledger ----


@scenario()
def the_ledger_is_restored_from_an_older_copy_while_agents_restart_too(world: World) -> None:
    """Agents know numbers that the ledger does not: nothing is given until a person accepts it, and then none twice."""
    serve(world)
    backup = world.coordinator.ledger.copy()
    _two_more_pushes(world)
    _put_back(world, backup)
    _stays_recovering(world)
    _accept(world)
    world.settle()


@scenario()
def agents_have_seen_a_later_coordinator_than_the_restored_ledger(world: World) -> None:
    """They are sent away with STALE_TERM until a person accepts the ledger, and then come under a new term."""
    serve(world)
    backup = world.coordinator.ledger.copy()
    for _ in range(2):
        _restart_seen_by_all(world)
    _two_more_pushes(world)
    _put_back(world, backup)
    _stays_recovering(world)
    expect(world, not any(r.session for r in world.coordinator.core.engines.values()), "no agent stays")
    expect(world, world.coverage.reasons["STALE_TERM"] > 0, "they are sent away")
    _accept(world)
    world.settle()


@scenario(counts={POLICY: 2, CRITIC: 1, REFERENCE: 1})
def an_older_copy_of_the_ledger_with_an_update_that_went_go(world: World) -> None:
    """What was open in the copy is decided from reports; the other models' terms and versions are above it too."""
    serve(world)
    update = next_update(world)
    world.run_until(lambda: update.phase is Phase.GO, 10.0, "go", look_seconds=0.0)
    backup = world.coordinator.ledger.copy()
    team(world).new_trainer(takeover=True)
    _two_more_pushes(world)
    _put_back(world, backup)
    _stays_recovering(world)
    _accept(world)
    world.settle()


@scenario()
def a_takeover_asks_an_older_copy_of_the_ledger_before_engines_that_know_a_later_term(world: World) -> None:
    """The copy's next term is one that a stopped trainer has. Nobody is given it: a lease waits for the engines."""
    serve(world)
    backup = world.coordinator.ledger.copy()
    zombie = team(world).new_trainer(takeover=True)
    world.run_until(lambda: zombie.pushed > 0, 30.0, "engines know its term")
    zombie.pause()
    for agent in world.agents.values():
        agent.on_death = nothing
    _put_back(world, backup)
    asks, before = team(world).new_trainer(takeover=True), world.coverage.reasons["COORDINATOR_RECOVERING"]
    world.run_until(lambda: world.coverage.reasons["COORDINATOR_RECOVERING"] > before, 10.0, "it is told to wait")
    expect(world, world.coordinator.ledger.kept.terms[POLICY] < zombie.term, "no term was given")
    for agent in world.agents.values():
        agent.on_death = partial(world.supervisor.restart, agent)
        agent.start()
    _stays_recovering(world)
    _accept(world)
    zombie.resume()
    world.run_until(lambda: zombie.fenced and asks.pushed > 0, 30.0, "the zombie is fenced, the new one pushes")
    expect(world, asks.term > zombie.term, f"{asks.term} follows {zombie.term}")
    world.settle()


def _restart_seen_by_all(world: World) -> None:
    term = world.coordinator.core.term
    world.coordinator.crash()
    agents = world.agents.values()
    world.run_until(lambda: all(a.seen_coordinator_term > term for a in agents), 20.0, "all are welcomed")


def _two_more_pushes(world: World) -> None:
    pushed = max(t.pushed for t in team(world).trainers)
    more = pushed + 2
    world.run_until(lambda: any(t.pushed >= more for t in team(world).trainers), 30.0, "two more pushes")


def _put_back(world: World, backup: tuple[MemoryLedger, Kept]) -> None:
    world.coordinator.crash()
    for agent in world.agents.values():
        agent.crash()
    world.coordinator.ledger.restore(backup)
    world.witness.ledger_put_back(world.coordinator)


def _stays_recovering(world: World) -> None:
    began = len(world.coordinator.ledger.kept.began)
    pass_time(world, QUIET_SECONDS)
    expect(world, world.coordinator.core.recovering, "the coordinator says that it is recovering")
    expect(world, len(world.coordinator.ledger.kept.began) == began, "no update began")
    expect(world, not any(a.present.open for a in team(world).agents.values()), "nobody serves what nobody holds")


def _accept(world: World) -> None:
    """`weightplane ledger accept`."""
    world.coordinator.handle(fe.LedgerAccepted(world.settings.run_id, "ann"))

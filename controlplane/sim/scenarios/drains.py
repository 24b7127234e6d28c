"""Engines that drain: they take nothing new, and leave an update that is under way."""

from __future__ import annotations

from controlplane.core.engine_state import HoldKind
from controlplane.core.update_transaction import Phase
from controlplane.sim.scenarios.stage import (
    expect,
    go_on,
    life,
    next_update,
    rest,
    scenario,
    serve,
    served,
)
from controlplane.sim.settings import POLICY
from controlplane.sim.world import World


@scenario()
def a_draining_engine_takes_nothing_new_until_its_end(world: World) -> None:
    """Updates are planned without it and refused by it; after the end of draining the next one heals it."""
    serve(world)
    rest(world)
    one = life(world, "e1")
    one.hold(HoldKind.DRAINING, "ann", present=True)
    world.run_until(lambda: not world.coordinator.core.engines[world.agents["e1"].engine_id].able, 5.0, "it is known")
    before = served(world)
    go_on(world)
    world.run_until(lambda: min(served(world)) > max(before), 20.0, "others go on")
    expect(world, one.core.state.applied in before, f"{one.core.state.applied} stays")
    one.hold(HoldKind.DRAINING, "ann", present=False)
    world.settle()


@scenario()
def an_engine_drains_before_go_and_the_update_goes_on(world: World) -> None:
    """It leaves the update, as if it had drained when that began; the coordinator dies after go, and finds it so."""
    serve(world)
    world.faults.slow_checks("e0", 0.5)
    update, one = next_update(world), life(world, "e1")
    one.hold(HoldKind.DRAINING, "ann", present=True)
    world.run_until(lambda: update.phase is Phase.GO, 10.0, "go", look_seconds=0.0)
    expect(world, not update.outcomes[world.agents["e1"].engine_id].required, "e1 is required no more")
    world.coordinator.crash()
    world.run_until(lambda: world.coordinator.up, 10.0, "it is back", look_seconds=0.0)
    world.run_until(lambda: update.version in served(world), 20.0, "it is decided")
    decision = world.coordinator.core.updates[update.update_id]
    expect(world, decision.phase is Phase.COMMITTED, f"{decision.phase} {decision.cause}")
    world.faults.slow_checks("e0", 0.0)
    one.hold(HoldKind.DRAINING, "ann", present=False)
    world.settle()


@scenario(counts={POLICY: 4}, units=True)
def a_member_of_a_unit_drains_before_go(world: World) -> None:
    """The unit leaves the update as a whole: one of two that apply is no unit."""
    serve(world)
    world.faults.slow_checks("e2", 0.5)
    update, one = next_update(world), life(world, "e1")
    one.hold(HoldKind.DRAINING, "ann", present=True)
    world.run_until(lambda: update.phase.final, 20.0, "it is decided", look_seconds=0.0)
    expect(world, update.phase is Phase.COMMITTED, f"{update.phase} {update.cause}")
    expect(world, sorted(o.engine_id for o in update.required) == ["e2", "e3"], f"{update.required}")
    world.faults.slow_checks("e2", 0.0)
    one.hold(HoldKind.DRAINING, "ann", present=False)
    world.settle()


@scenario()
def every_engine_drains_before_go(world: World) -> None:
    """Somebody must be left: the update fails, and costs nothing."""
    serve(world)
    world.faults.slow_checks("e0", 0.5)
    update, before = next_update(world), served(world)
    for agent in world.agents.values():
        agent.present.hold(HoldKind.DRAINING, "ann", present=True)
    world.run_until(lambda: update.phase.final, 20.0, "it is decided")
    expect(world, update.phase is Phase.FAILED and served(world) == before, f"{update.phase} {update.cause}")
    world.faults.slow_checks("e0", 0.0)
    for agent in world.agents.values():
        agent.present.hold(HoldKind.DRAINING, "ann", present=False)
    world.settle()

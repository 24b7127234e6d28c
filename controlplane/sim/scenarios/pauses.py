"""Engines that are paused in each mode, at installs too, and engines whose core does not answer."""

from __future__ import annotations

from controlplane.core.engine_state import HoldKind
from controlplane.core.pauses import PauseMode, PausePolicy
from controlplane.core.update_transaction import Phase
from controlplane.sim.agent import EngineLife
from controlplane.sim.scenarios.stage import (
    expect,
    go_on,
    life,
    next_decision,
    nothing,
    pass_time,
    rest,
    scenario,
    serve,
)
from controlplane.sim.world import World

WAITS = PausePolicy(PauseMode.WAIT, wait_seconds=4.0)


def _with_requests(world: World) -> EngineLife:
    """An engine that has some to finish. Trainers rest."""
    serve(world)
    rest(world)
    one = life(world, "e0")
    world.run_until(lambda: one.requests.some, 60.0, "e0 has requests", look_seconds=0.0)
    return one


@scenario()
def a_pause_lets_requests_finish_and_then_holds(world: World) -> None:
    """Nobody enters meanwhile; then the engine stands still until its owner's word."""
    one = _with_requests(world)
    one.work.pause("ann", WAITS, nothing)
    expect(world, one.core.state.held_by(HoldKind.FINISHING) == "ann", "requests are waited for")
    expect(world, not one.core.gate_open and one.work.scheduler.runs, "who is in goes on")
    world.run_until(lambda: one.core.state.held_by(HoldKind.OPERATOR) == "ann", 6.0, "it is held", look_seconds=0.0)
    expect(world, not one.requests.some, "nobody was cut")
    world.run_until(lambda: not one.work.scheduler.runs, 3.0, "it stands still")
    one.hold(HoldKind.OPERATOR, "ann", present=False)
    world.run_until(lambda: one.open, 3.0, "it serves again")
    go_on(world)
    world.settle()


@scenario()
def a_pause_is_ended_while_requests_finish(world: World) -> None:
    """Its owner's word counts: no hold comes after it."""
    one = _with_requests(world)
    one.work.pause("ann", WAITS, nothing)
    one.hold(HoldKind.FINISHING, "ann", present=False)
    pass_time(world, 5.0)
    expect(world, one.core.state.held_by(HoldKind.OPERATOR) is None and one.open, "it serves")
    go_on(world)
    world.settle()


@scenario()
def a_pause_aborts_what_takes_longer(world: World) -> None:
    """Its fallback: each sample ends with the tokens that it has."""
    one = _with_requests(world)
    one.work.pause("ann", PausePolicy(PauseMode.WAIT, 0.0, PauseMode.ABORT), nothing)
    world.run_until(lambda: not one.requests.some, 3.0, "they are cut")
    one.hold(HoldKind.OPERATOR, "ann", present=False)
    go_on(world)
    world.settle()


@scenario()
def a_stalled_engine_is_routed_to_by_nobody(world: World) -> None:
    """It takes updates, which have deadlines of their own; it serves when its core answers again."""
    serve(world)
    one, name = life(world, "e1"), world.agents["e1"].engine_id
    world.run_until(lambda: one.work.idle and one.open, 10.0, "it stands idle", look_seconds=0.0)
    one.work.stall(6.0)
    expect(world, not one.core.gate_open, "its gate is shut")
    core = world.coordinator.core
    world.run_until(lambda: not core.routable(core.engines[name]), 5.0, "nobody is sent there")
    update = next_decision(world)
    expect(world, update.phase is Phase.COMMITTED, f"{update.phase} {update.cause}")
    expect(world, not one.core.gate_open, "its gate is shut still")
    world.run_until(lambda: one.open, 10.0, "it serves again")
    world.settle()

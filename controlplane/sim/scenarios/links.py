"""Connections that break, and streams that come twice."""

from __future__ import annotations

from controlplane.core.update_transaction import Phase
from controlplane.sim.scenarios.stage import (
    expect,
    next_decision,
    next_push,
    scenario,
    serve,
)
from controlplane.sim.world import World


@scenario()
def the_link_breaks_after_the_commit_frame(world: World) -> None:
    """The agents own their installs; the writer comes again, attaches and gets the outcome."""
    serve(world)
    world.faults.arm("trainer.after_commit", "t0", "cut")
    update = next_decision(world)
    expect(world, update.phase in (Phase.COMMITTED, Phase.FAILED), f"{update.phase} {update.cause}")
    world.settle()


@scenario()
def the_same_update_is_opened_twice(world: World) -> None:
    """The later stream starts anew at chunk 0, the older one is ended, one install comes of it."""
    serve(world)
    push = next_push(world, lambda push: bool(push.feeds))
    for delay in (0.05, 0.1):
        world.supervisor.after(delay, push.feeds[0].again)
    world.run_until(lambda: push.phase.final, 20.0, "it is decided", look_seconds=0.0)
    world.settle()

"""An engine dies, drains or is to sleep at each stage of an update; and installs end in every way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.engine_state import Activity, HoldKind
from controlplane.sim.agent import EngineLife
from controlplane.sim.engine import MIXTURE, InstallEnding
from controlplane.sim.scenarios.stage import (
    ALL,
    SCENARIOS,
    THREE,
    Scenario,
    expect,
    life,
    next_decision,
    next_update,
    nothing,
    refuses,
    serve,
)
from controlplane.sim.world import World

Disturbance = Callable[[World, EngineLife], None]


def _dies(world: World, one: EngineLife) -> None:
    one.die("killed")


def _drains(world: World, one: EngineLife) -> None:
    one.hold(HoldKind.DRAINING, "ann", present=True)


def _sleeps(world: World, one: EngineLife) -> None:
    event = ee.SleepRequested("ann", 2)
    if one.core.state.installing:  # an install is never cut
        refuses(world, e.UpdateInProgress, lambda: one.work.sleep(event, nothing))
    else:
        one.work.sleep(event, nothing)


def _is_at(activity: Activity, world: World) -> EngineLife:
    """e1, at that stage of an update; where it must wait for others they are slow."""
    serve(world)
    slow = "e0" if activity is Activity.READY else "e1"
    world.faults.slow_checks(slow, 0.5)
    world.faults.slow_installs("e1", 1.0)
    update, one = next_update(world), life(world, "e1")

    def so_far() -> bool:
        progress = one.core.state.progress
        mine = progress is not None and progress.update_id == update.update_id
        touched = activity is not Activity.INSTALLING or one.engine.content == MIXTURE
        return mine and one.core.state.activity is activity and touched

    world.run_until(so_far, 15.0, f"e1 is {activity.value}", look_seconds=0.0)
    world.faults.slow_checks(slow, 0.0)
    world.faults.slow_installs("e1", 0.0)
    return one


def _disturbed(world: World, activity: Activity, disturb: Disturbance) -> None:
    """It costs that engine at most its install; the next updates heal it once it is able again."""
    one = _is_at(activity, world)
    disturb(world, one)
    goes_on = one.core.state.installing and not one.over
    expect(world, goes_on == (activity is Activity.INSTALLING and disturb is not _dies), "only installs go on")
    world.settle()


def _installs_badly(world: World, ending: InstallEnding) -> None:
    """What becomes of the others does not depend on how."""
    serve(world)
    world.faults.next_installs("e1", ending)
    update = next_decision(world)
    bad = update.outcomes[world.agents["e1"].engine_id]
    expect(world, bad.bad and not bad.applied, f"{bad}")
    world.settle()


for _activity in (Activity.RECEIVING, Activity.READY, Activity.INSTALLING):
    for _name, _disturb in {"dies": _dies, "drains": _drains, "is_to_sleep": _sleeps}.items():
        _script = partial(_disturbed, activity=_activity, disturb=_disturb)
        SCENARIOS[f"an_engine_{_name}_while_{_activity.value}"] = Scenario(_script, ALL, THREE)
for _ending in InstallEnding:
    if _ending is not InstallEnding.WORKS:
        SCENARIOS[f"an_install_that_is_{_ending.value.replace(' ', '_')}"] = Scenario(
            partial(_installs_badly, ending=_ending), ALL, THREE
        )

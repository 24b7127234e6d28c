"""Updates that are installed as they come: what ends them, and where."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.engine_state import Activity, HoldKind, Poisoned
from controlplane.core.update_transaction import Phase, UpdateTransaction
from controlplane.core.versions import Term
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
    scenario,
    serve,
    served,
    team,
    trainer,
)
from controlplane.sim.settings import POLICY
from controlplane.sim.world import World

BOUND_SECONDS = 30.0


def _streams(world: World, name: str) -> tuple[UpdateTransaction, EngineLife]:
    """The next update, when that engine has some of it in its weights and waits for more."""
    world.faults.slow_checks(name, 0.5)
    update, one = next_update(world), life(world, name)

    def so_far() -> bool:
        core = one.core.update
        mine = core is not None and core.update_id == update.update_id and core.in_stream
        return mine and one.engine.content == MIXTURE

    world.run_until(so_far, 20.0, f"{name} streams", look_seconds=0.0)
    world.faults.slow_checks(name, 0.0)
    return update, one


def _is_poisoned(world: World, one: EngineLife) -> None:
    """INV-4: at once or in a moment, and shut until the next push heals it."""
    expect(world, one.core.state.applied is None and not one.core.gate_open, "it claims nothing")
    world.run_until(lambda: isinstance(one.core.state.weights, Poisoned), 5.0, "it is poisoned", look_seconds=0.0)
    expect(world, not one.core.gate_open, "its gate is shut")


@scenario(streaming=3)
def a_streaming_fleet_is_quiet(world: World) -> None:
    """Nothing goes wrong: ready costs nothing, chunks go after go, and all serve what was pushed."""
    serve(world)
    update = next_update(world)
    world.run_until(lambda: update.phase is Phase.GO, 10.0, "go", look_seconds=0.0)
    installs = [a.present.core.state.installing for a in world.agents.values()]
    expect(world, not any(installs), "nothing was touched before go")
    world.settle()


@scenario(counts={POLICY: 4}, lends=True, streaming=1)
def one_engine_streams_beside_others_that_stage(world: World) -> None:
    """By shared memory from its own rank, while the others' ranks send over links."""
    serve(world)
    _streams(world, "e0")
    world.settle()


@scenario(streaming=3)
def a_stream_breaks_in_the_middle_of_its_install(world: World) -> None:
    """Its end is no commit (INV-3) and costs that engine its version (INV-4): the others serve the new one."""
    serve(world)
    update, one = _streams(world, "e1")
    push = trainer(world).push
    assert push is not None
    feed = next(f for f in push.feeds if f.engine_id == one.agent.engine_id)
    feed.cut()
    _is_poisoned(world, one)
    world.run_until(lambda: update.phase.final, 20.0, "it is decided")
    expect(world, update.phase is Phase.DEGRADED and "e1 failed" in update.cause, f"{update.phase} {update.cause}")
    world.settle()


@scenario(streaming=3)
def a_stream_ends_between_its_last_chunk_and_its_commit(world: World) -> None:
    """Every byte is in and right, and it is no commit all the same."""
    serve(world)
    _, one = _streams(world, "e1")

    def all_in() -> bool:
        update = one.core.update
        return update is not None and update.verified and not update.committed

    world.run_until(all_in, 10.0, "every byte is in", look_seconds=0.0)
    trainer(world).crash()
    _is_poisoned(world, one)
    world.settle()


@scenario(streaming=3)
def a_trainer_dies_while_every_engine_streams(world: World) -> None:
    """All of them are mixtures: nothing is served, and its next life lights the fleet up again."""
    serve(world)
    for name in world.agents:
        world.faults.slow_checks(name, 0.5)
    update = next_update(world)
    lives = [a.present for a in world.agents.values()]
    world.run_until(lambda: all(x.engine.content == MIXTURE for x in lives), 20.0, "all stream", look_seconds=0.0)
    trainer(world).crash()
    for name in world.agents:
        world.faults.slow_checks(name, 0.0)
    world.run_until(lambda: update.phase.final, 20.0, "it is decided")
    expect(world, update.phase is Phase.FAILED, f"{update.phase} {update.cause}")
    world.settle()


@scenario(streaming=3)
def a_trainer_dies_before_the_first_chunk(world: World) -> None:
    """Until then an end costs nothing: every engine serves on."""
    serve(world)
    before = served(world)
    world.faults.arm("trainer.between_chunks", trainer(world).name)
    world.run_until(lambda: not trainer(world).up, 20.0, "it dies", look_seconds=0.0)
    expect(world, all(a.present.core.state.applied in before for a in world.agents.values()), "they hold it still")
    world.settle()


@scenario(streaming=3)
def a_higher_term_ends_an_install_without_a_commit(world: World) -> None:
    """A fenced writer's install is not left to it (INV-7): the engine is shut, and its successor heals it."""
    serve(world)
    _, one = _streams(world, "e1")
    zombie = trainer(world)
    zombie.pause()
    team(world).new_trainer(takeover=True)
    _is_poisoned(world, one)
    expect(world, one.core.term > zombie.term, f"{one.core.term} follows {zombie.term}")
    zombie.resume()
    world.run_until(lambda: zombie.fenced, 10.0, "it is fenced")
    world.settle()


@scenario(streaming=3)
def a_writer_that_was_fenced_goes_on_sending(world: World) -> None:
    """It did not hear of it yet, and the engine did: what comes is not taken, and ends nothing well."""
    serve(world)
    _, one = _streams(world, "e1")
    term = Term(one.core.term + 1)
    one.apply(ee.FleetChanged(one.core.coordinator_term, term, one.core.served))
    _is_poisoned(world, one)
    team(world).new_trainer(takeover=True)
    world.settle()


@scenario(streaming=3)
def a_commit_that_does_not_state_what_was_streamed(world: World) -> None:
    """INV-3: nothing is claimed by it, and what is in is poison."""
    serve(world)
    _, one = _streams(world, "e1")
    update = one.core.update
    assert update is not None
    stream = one.streams[update.stream]
    stream.commit(update.version, 1, 1, b"y" * 32)
    _is_poisoned(world, one)
    world.settle()


@scenario(streaming=3)
def a_silent_writer_ends_an_install_without_a_commit(world: World) -> None:
    """It is stopped, not dead: after the idle limit the engine gives up."""
    serve(world)
    _, one = _streams(world, "e1")
    mine = trainer(world)
    mine.pause()
    world.run_until(lambda: isinstance(one.core.state.weights, Poisoned), 20.0, "it is poisoned", look_seconds=0.0)
    mine.resume()
    world.settle()


@scenario(streaming=3)
def an_agent_dies_with_a_part_of_it_in(world: World) -> None:
    """It comes back unset."""
    serve(world)
    world.faults.arm("engine.mid_streaming", "e1")
    update = next_decision(world)
    expect(world, update.phase is Phase.DEGRADED and "e1 lost" in update.cause, f"{update.phase} {update.cause}")
    world.settle()


@scenario(streaming=3)
def a_streaming_engine_that_joins_a_run_of_fast_steps(world: World) -> None:
    """Its bytes take longer than a step, and nobody waits for them at the decision: it must serve all the same."""
    serve(world)
    world.faults.slow_checks("e2", 2.0)
    world.agents["e2"].crash()
    world.run_until(lambda: world.agents["e2"].up and life(world, "e2").notes.welcomed, 10.0, "e2 is back")
    world.run_until(lambda: life(world, "e2").open, BOUND_SECONDS, "e2 serves")
    world.faults.slow_checks("e2", 0.0)
    world.settle()


def _holds(world: World, one: EngineLife) -> None:
    one.hold(HoldKind.OPERATOR, "ann", present=True)


def _drains(world: World, one: EngineLife) -> None:
    one.hold(HoldKind.DRAINING, "ann", present=True)


def _sleeps(world: World, one: EngineLife) -> None:
    refuses(world, e.UpdateInProgress, lambda: one.work.sleep(ee.SleepRequested("ann", 2), nothing))


def _disagrees(world: World, one: EngineLife) -> None:
    one.requests.disagree()


def _goes_on(world: World, disturb: Callable[[World, EngineLife], None]) -> None:
    """An install is never cut by anybody but its writer: it ends applied."""
    serve(world)
    update, one = _streams(world, "e1")
    disturb(world, one)
    expect(world, one.core.state.installing, "it goes on")
    world.run_until(lambda: one.core.state.applied == update.version, 20.0, "it applies", look_seconds=0.0)
    world.settle()


def _dies(world: World, activity: Activity) -> None:
    serve(world)
    world.faults.slow_checks("e1", 0.5)
    next_update(world)
    one = life(world, "e1")
    world.run_until(lambda: one.core.state.activity is activity, 15.0, f"e1 is {activity.value}", look_seconds=0.0)
    world.faults.slow_checks("e1", 0.0)
    one.die("killed")
    world.settle()


def _ends_badly(world: World, ending: InstallEnding) -> None:
    serve(world)
    world.faults.next_installs("e1", ending)
    update = next_decision(world)
    bad = update.outcomes[world.agents["e1"].engine_id]
    expect(world, bad.bad and not bad.applied, f"{bad}")
    world.settle()


for _name, _disturb in {"held": _holds, "drained": _drains, "put_to_sleep": _sleeps, "distrusted": _disagrees}.items():
    _script = partial(_goes_on, disturb=_disturb)
    SCENARIOS[f"an_engine_is_{_name}_while_it_streams"] = Scenario(_script, ALL, THREE, streaming=3)
for _activity in (Activity.READY, Activity.INSTALLING):
    _script = partial(_dies, activity=_activity)
    SCENARIOS[f"a_streaming_engine_dies_while_{_activity.value}"] = Scenario(_script, ALL, THREE, streaming=3)
for _ending in InstallEnding:
    if _ending is not InstallEnding.WORKS:
        _script = partial(_ends_badly, ending=_ending)
        _name = f"a_streaming_install_that_is_{_ending.value.replace(' ', '_')}"
        SCENARIOS[_name] = Scenario(_script, ALL, THREE, streaming=3)

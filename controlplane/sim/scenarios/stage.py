"""How a scenario is listed, and what scenarios share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from controlplane.core import errors as e
from controlplane.core.fleet_records import CheckpointKept
from controlplane.core.update_policy import UpdatePolicy
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import ModelName, WeightVersion
from controlplane.sim.agent import EngineLife
from controlplane.sim.push import Push
from controlplane.sim.settings import POLICY, SimSettings
from controlplane.sim.shipment import Shipment
from controlplane.sim.team import Team
from controlplane.sim.trainer import Trainer
from controlplane.sim.world import World

Script = Callable[[World], None]
ALL = UpdatePolicy()
THREE = {POLICY: 3}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A script, and the world that it is written for."""

    run: Script
    policy: UpdatePolicy
    counts: Mapping[ModelName, int]
    units: bool = False
    lends: bool = False
    streaming: int = 0

    def settings(self, given: SimSettings) -> SimSettings:
        """Checkpoints are written when the script says so."""
        return replace(
            given,
            policy=self.policy,
            counts=self.counts,
            units=self.units,
            lends=self.lends,
            streaming=self.streaming,
            checkpoints=False,
        )


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    policy: UpdatePolicy = ALL,
    counts: Mapping[ModelName, int] = THREE,
    *,
    units: bool = False,
    lends: bool = False,
    streaming: int = 0,
) -> Callable[[Script], Script]:
    """Lists a script. Its world has engines of the policy alone, on devices of their own, unless it says otherwise."""

    def listed(script: Script) -> Script:
        SCENARIOS[script.__name__] = Scenario(script, policy, counts, units, lends, streaming)
        return script

    return listed


# ---- who is there ----


def team(world: World) -> Team:
    return world.teams[POLICY]


def trainer(world: World) -> Trainer:
    return team(world).trainers[0]


def life(world: World, name: str) -> EngineLife:
    return world.agents[name].present


def served(world: World) -> tuple[WeightVersion, ...]:
    return team(world).served


# ---- how far it is ----


def serve(world: World) -> None:
    """Start, until every engine serves a version and no update is open."""
    world.start()
    until_quiet(world)


def until_quiet(world: World) -> None:
    def quiet() -> bool:
        core = world.coordinator.core
        return world.well() and not any(core.open_update(name) for name in world.teams)

    world.run_until(quiet, 30.0, "a version is served", look_seconds=0.0)


def rest(world: World) -> None:
    """No push any more, and every engine serves the last one's version."""
    for one in world.teams.values():
        one.rests = True

    def over() -> bool:
        pushes = [t.push for t in world.trainers if t.push is not None]
        return all(p.over for p in pushes) and not any(t.devices.busy for t in world.trainers) and world.well()

    world.run_until(over, 30.0, "nothing is pushed", look_seconds=0.0)


def go_on(world: World) -> None:
    for one in world.teams.values():
        one.rests = False


def shipped(mine: Trainer) -> Shipment:
    """What its latest push brought."""
    assert mine.push is not None
    assert mine.push.shipment is not None
    return mine.push.shipment


def checkpoint(world: World) -> CheckpointKept:
    """What is served lies in a checkpoint. Trainers rest."""
    rest(world)
    shipment = shipped(trainer(world))
    number = shipment.begun.version.number
    trainer(world).publisher.write(shipment, surely=True)
    known = world.coordinator.core.model(POLICY).checkpoints
    world.run_until(lambda: number in known, 10.0, "the checkpoint is known")
    return known[number]


def next_update(world: World, model: ModelName = POLICY) -> UpdateTransaction:
    def found() -> UpdateTransaction | None:
        return world.coordinator.core.open_update(model)

    world.run_until(lambda: found() is not None, 20.0, "the next update begins", look_seconds=0.0)
    update = found()
    assert update is not None
    return update


def decided(world: World, update: UpdateTransaction) -> UpdateTransaction:
    world.run_until(lambda: update.phase.final, 30.0, "it is decided", look_seconds=0.0)
    return update


def next_decision(world: World) -> UpdateTransaction:
    """The next update, when it is decided."""
    return decided(world, next_update(world))


def next_push(world: World, what: Callable[[Push], bool]) -> Push:
    """The trainer's push of the next update, once `what` is true of it."""
    mine, update = trainer(world), next_update(world)

    def it_is_so() -> bool:
        push = mine.push
        its_own = push is not None and push.shipment is not None and push.shipment.begun.update_id == update.update_id
        return push is not None and its_own and what(push)

    world.run_until(it_is_so, 10.0, "the push is so far", look_seconds=0.0)
    assert mine.push is not None
    return mine.push


def pass_time(world: World, seconds: float) -> None:
    end = world.kernel.now + seconds
    world.run_until(lambda: world.kernel.now >= end, seconds + 5.0, "time goes by")


# ---- what must be ----


def expect(world: World, good: bool, text: object) -> None:
    world.witness.check(good, "scenario", f"{text}; {world.describe()}")


def refuses(world: World, error: type[e.WeightplaneError], action: Callable[[], object]) -> None:
    try:
        action()
    except error:
        return
    expect(world, False, f"{error.__name__} was expected")


def nothing() -> None:
    """Where an answer is nobody's business."""

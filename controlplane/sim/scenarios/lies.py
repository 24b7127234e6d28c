"""Every wrong thing that somebody can say is said once, and meets its reason."""

from __future__ import annotations

from controlplane.core.engine_state import Held
from controlplane.core.errors import error_classes
from controlplane.core.versions import WeightVersion
from controlplane.sim.agent import EngineLife
from controlplane.sim.lies import lies
from controlplane.sim.scenarios.stage import checkpoint, expect, go_on, life, rest, scenario, serve, team
from controlplane.sim.settings import CRITIC, POLICY, REFERENCE
from controlplane.sim.world import World

REASONS = frozenset(c.reason for c in error_classes())


@scenario(counts={POLICY: 2, CRITIC: 1})
def every_lie_to_an_engine_meets_its_reason(world: World) -> None:
    """And leaves what it holds in force."""
    serve(world)
    rest(world)
    one = life(world, "e0")
    held = one.core.state.weights
    for number, name in enumerate(lies(one, WeightVersion(1, one.core.term))):
        version = WeightVersion(10**6 + number, one.core.term)
        met = world.coverage.reasons[name]
        _tell(world, one, version, name)
        expect(world, name not in REASONS or world.coverage.reasons[name] > met, f"it meets {name}")
        expect(world, one.core.state.weights == held and isinstance(held, Held), f"{name} changed it")
    one.requests.disagree()
    for number, name in enumerate(("ENGINE_POISONED", "VERSION_CONFLICT")):
        met = world.coverage.reasons[name]
        _tell(world, one, WeightVersion(2 * 10**6 + number, one.core.term), name)
        expect(world, world.coverage.reasons[name] > met, f"it meets {name}")
    go_on(world)
    world.settle()


@scenario(counts={CRITIC: 1})
def every_lie_to_an_engine_with_a_draft_is_refused(world: World) -> None:
    """Also those about its draft, which is covered whole or not at all."""
    serve(world)
    rest(world)
    one = life(world, "ce0")
    held = one.core.state.weights
    for number, name in enumerate(lies(one, WeightVersion(1, one.core.term))):
        _tell(world, one, WeightVersion(10**6 + number, one.core.term), name)
        expect(world, one.core.state.weights == held and isinstance(held, Held), f"{name} changed it")
    go_on(world)
    world.settle()


def _tell(world: World, one: EngineLife, version: WeightVersion, name: str) -> None:
    made = one.streams_made
    world.rogue.lie(world.agents[one.agent.name], version, lies(one, version)[name])
    world.run_until(lambda: one.streams_made > made and not one.streams, 25.0, f"{name} is told", look_seconds=0.0)


@scenario(counts={POLICY: 1, CRITIC: 1, REFERENCE: 1})
def every_lie_to_a_frozen_engine_is_refused(world: World) -> None:
    """It takes nothing, whatever is right with it."""
    serve(world)
    one = life(world, "re0")
    held = one.core.state.weights
    for number, name in enumerate(lies(one, WeightVersion(1, one.core.term))):
        version = WeightVersion(10**6 + number, one.core.term)
        _tell(world, one, version, name)
        expect(world, one.core.state.weights == held and one.core.state.progress is None, f"{name} changed it")
    expect(world, world.coverage.reasons["MODEL_FROZEN"] > 0, "it says why")
    world.settle()


@scenario(counts={POLICY: 1, CRITIC: 1, REFERENCE: 1})
def every_wrong_call_is_refused(world: World) -> None:
    """By the coordinator, with nothing changed."""
    serve(world)
    checkpoint(world)
    for one in world.teams.values():
        for event in world.rogue.calls(one):
            before = (world.coordinator.core.next_number, team(world).served)
            world.rogue.call(event)
            expect(world, before == (world.coordinator.core.next_number, team(world).served), event)
    for reason in ("REQUEST_CONFLICT", "CHECKPOINT_UNKNOWN", "VERSION_UNAVAILABLE", "VERSION_CONFLICT", "STALE_TERM"):
        expect(world, world.coverage.reasons[reason] > 0, f"{reason} was met")
    go_on(world)
    world.settle()

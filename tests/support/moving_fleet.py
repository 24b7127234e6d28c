"""A fleet whose trainer goes on: what is waited for, and samples meanwhile."""

from __future__ import annotations

from collections import Counter

from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet

SECONDS = 90.0


async def served(fleet: LocalFleet) -> int:
    models = (await fleet.view()).state.models
    return max((v.number for m in models for v in m.served), default=0)


async def moved_on(fleet: LocalFleet, steps: int) -> None:
    """Wait until the fleet serves a version so many further on."""
    before = await served(fleet)

    async def further() -> bool:
        return await served(fleet) >= before + steps

    await eventually(further, within=SECONDS)


async def serves(fleet: LocalFleet, engine_id: str) -> None:
    async def routable() -> bool:
        return any(e.routable and e.status.engine.engine_id == engine_id for e in (await fleet.view()).engines)

    await eventually(routable, within=SECONDS)


async def sample_on(rollouts: RolloutClient, seen: Counter[str]) -> None:
    """One sample after the other, counted by the engine that made it; the first that fails ends it."""
    while True:
        sample = await rollouts.generate([1, 2, 3], SamplingSettings(max_tokens=4))
        seen[sample.engine_id] += 1

"""Engines join and leave in the middle of a training run, as processes; training and rollouts never stop."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from controlplane.cli import engine_orders as orders
from controlplane.rollout.client import RolloutClient
from tests.support.eventually import eventually
from tests.support.moving_fleet import SECONDS, moved_on, sample_on, serves
from tests.support.toy_rank import Script
from tests.support.toy_trainer import EngineProcess, fleet_for_toys, toy_trainer

pytestmark = pytest.mark.timeout(400)
STEPS = 10_000
"""More than there are; the ranks are ended with the test."""


async def test_l1_a_third_engine_joins_and_another_leaves_while_training_goes_on(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        engines = {name: await EngineProcess.start(fleet, name) for name in ("e0", "e1")}
        await fleet.wait_for_engines(2)
        await trainer.start_ranks(Script(steps=STEPS, pause_before_step=0.1), world=1)
        await moved_on(fleet, 1)
        seen: Counter[str] = Counter()
        async with RolloutClient(fleet.address) as rollouts:
            sampling = asyncio.create_task(sample_on(rollouts, seen))
            engines["e2"] = await EngineProcess.start(fleet, "e2")
            await serves(fleet, "e2")
            await eventually(lambda: seen["e2"] > 0)
            leaving = orders.Target(fleet.address, "e1", SECONDS)
            await orders.drain(leaving, "operator", SECONDS)
            await orders.shutdown(leaving, "there are enough", SECONDS)
            assert await engines.pop("e1").ended() == 0
            left = seen["e1"]
            await moved_on(fleet, 3)
            assert not sampling.done(), sampling
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling
        assert (left, seen["e0"] > 0) == (seen["e1"], True)
        # Who drains leaves an update that is under way.
        assert trainer.ranks[0].said("failed") == []
        assert trainer.ranks[0].process.returncode is None, "it trains on"
        for engine in engines.values():
            await engine.stop()


async def test_l1_an_engine_that_loads_for_longer_than_a_step_takes_joins_all_the_same(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        fast = await EngineProcess.start(fleet, "e0")
        await fleet.wait_for_engines(1)
        await trainer.start_ranks(Script(steps=STEPS), world=1)
        await moved_on(fleet, 3)
        slow = await EngineProcess.start(fleet, "slow", install_seconds=0.8)
        await serves(fleet, "slow")
        assert trainer.ranks[0].process.returncode is None, "it trains on"
        for engine in (fast, slow):
            await engine.stop()

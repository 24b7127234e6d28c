"""An engine agent that is killed while somebody else has its engine's devices, and starts anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from controlplane.cli import engine_orders as orders
from controlplane.cli.ending import CommandFailed
from controlplane.devices import cpu_device_uuid
from tests.support.eventually import eventually
from tests.support.holds import holds
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.thread_rank import ThreadRank, Toy
from tests.support.toy_trainer import EngineProcess, ToyTrainer, fleet_for_toys, toy_trainer
from weightplane.v1 import engine_pb2, lifecycle_pb2, lifecycle_pb2_grpc, operator_pb2

pytestmark = pytest.mark.timeout(240)

LEASE_SECONDS = 1.5
WATCH_SECONDS = 2.0
"""Longer than an agent takes to start its engine, and than the lease's time."""


@dataclass
class Rig:
    """A trainer of one rank, and an engine on its device that holds version 1."""

    fleet: LocalFleet
    trainer: ToyTrainer
    rank: ThreadRank
    engine: EngineProcess

    async def die_and_start(self) -> None:
        await self.engine.kill()
        await self.start()

    async def start(self) -> None:
        self.engine = await EngineProcess.start(self.fleet, "e0", device=cpu_device_uuid(0))

    async def view(self) -> operator_pb2.EngineView:
        return await self.fleet.engine("e0")

    async def waits(self) -> None:
        """Until the new agent is heard; then its engine is dead and sleeps, for longer than any start takes. (It may be
        missed in between: what it said last is told on.)"""
        await eventually(self._dead_and_heard)
        for _ in range(int(WATCH_SECONDS / 0.1)):
            assert self._sleeps_dead(view := await self.view()), view.status
            await asyncio.sleep(0.1)

    async def runs(self) -> None:
        async def running() -> bool:
            view = await self.view()
            return view.known and view.status.life == engine_pb2.ENGINE_LIFE_RUNNING and not view.status.holds

        await eventually(running)

    async def serves(self, number: int) -> None:
        async def serving() -> bool:
            view = await self.view()
            return view.routable and view.status.applied.number == number

        await eventually(serving)

    async def _dead_and_heard(self) -> bool:
        if not await _known(self.fleet):
            return False
        view = await self.view()
        return view.known and self._sleeps_dead(view)

    def _sleeps_dead(self, view: operator_pb2.EngineView) -> bool:
        asleep = {kind for kind, _ in holds(view.status)} == {"ASLEEP"}
        return asleep and view.status.life == engine_pb2.ENGINE_LIFE_DEAD


@asynccontextmanager
async def shared(tmp_path: Path) -> AsyncIterator[Rig]:
    async with (
        fleet_for_toys(tmp_path, engines=0, lease_ttl_seconds=LEASE_SECONDS) as fleet,
        toy_trainer(fleet.address) as trainer,
    ):
        engine = await EngineProcess.start(fleet, "e0", device=cpu_device_uuid(0))
        await eventually(lambda: _known(fleet))
        rank = await ThreadRank.join(trainer.directory / "ranks.sock", Toy())
        rig = Rig(fleet, trainer, rank, engine)
        try:
            await rank.push(0)
            yield rig
        finally:
            await rank.close()
            await rig.engine.stop()


async def _known(fleet: LocalFleet) -> bool:
    return any(e.known for e in (await fleet.view()).engines)


async def test_inv7_an_agent_that_starts_anew_leaves_devices_to_the_trainer_until_they_are_given(
    tmp_path: Path,
) -> None:
    async with shared(tmp_path) as rig:
        await asyncio.to_thread(rig.rank.rank.take_devices, 2)
        await rig.die_and_start()
        await rig.waits()
        await asyncio.to_thread(rig.rank.rank.take_devices, 2)  # what is taken already may be taken again
        assert await asyncio.to_thread(rig.rank.rank.give_devices) == {}
        await rig.runs()
        await rig.rank.push(1)
        await rig.serves(2)


@pytest.mark.slow
async def test_what_was_given_while_the_agent_was_dead_it_hears_from_the_coordinator(tmp_path: Path) -> None:
    async with shared(tmp_path) as rig:
        await asyncio.to_thread(rig.rank.rank.take_devices)
        await rig.engine.kill()
        await asyncio.to_thread(rig.rank.rank.give_devices)
        assert (tmp_path / "engines" / "e0.lent.json").exists()
        await rig.start()
        await rig.runs()
        assert not (tmp_path / "engines" / "e0.lent.json").exists()


@pytest.mark.slow
async def test_a_lease_that_is_over_frees_the_devices_and_a_coordinators_restart_does_not(tmp_path: Path) -> None:
    async with shared(tmp_path) as rig:
        await asyncio.to_thread(rig.rank.rank.take_devices)
        await rig.die_and_start()
        await rig.fleet.stop("coordinator")
        await rig.fleet.start_coordinator(lease_ttl_seconds=LEASE_SECONDS)
        await rig.waits()
        rig.rank.die()
        await rig.trainer.agent.close()
        await rig.runs()


@pytest.mark.slow
async def test_what_sleeps_for_a_person_is_woken_by_the_command_alone(tmp_path: Path) -> None:
    async with shared(tmp_path) as rig:
        view = await rig.view()
        stub = lifecycle_pb2_grpc.LifecycleStub(rig.fleet.channel(view.endpoint))
        await stub.Sleep(lifecycle_pb2.SleepRequest(run_id=RUN, engine=view.status.engine, owner="ann", level=1))
        await rig.die_and_start()
        await rig.waits()
        target = orders.Target(rig.fleet.address, "e0", 60.0)
        with pytest.raises(CommandFailed, match="e0 sleeps for ann, not for bob"):
            await orders.wake(target, "bob", 0.0, anyway=False)
        assert await orders.wake(target, "", 0.0, anyway=False) == "e0: ann has it no more"
        await rig.runs()


@pytest.mark.slow
async def test_the_command_wakes_what_a_live_trainer_has_only_if_told_so_twice(tmp_path: Path) -> None:
    async with shared(tmp_path) as rig:
        await asyncio.to_thread(rig.rank.rank.take_devices)
        target = orders.Target(rig.fleet.address, "e0", 60.0)
        with pytest.raises(CommandFailed, match=r"trainer toy \(term 1\) has its devices, and its lease stands"):
            await orders.wake(target, "", 0.0, anyway=False)
        assert (await rig.fleet.status("e0")).word == "asleep"
        assert await orders.wake(target, "", 10.0, anyway=True) == "e0 is routable"
        assert await orders.wake(target, "", 0.0, anyway=False) == "e0 sleeps for nobody"

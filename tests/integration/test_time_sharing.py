"""A trainer and an engine on one device: they take turns, and their memory is never there together."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.core.canary import Canary
from controlplane.core.errors import CanaryFailed, DeadlineExceeded, UnsupportedByEngine
from controlplane.core.names import trainer_owner
from controlplane.devices import cpu_device_uuid
from controlplane.rpc.errors import from_rpc_error
from tests.support.device_memory import AccountingEngine, DeviceMemory
from tests.support.eventually import eventually
from tests.support.holds import holds
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.thread_rank import Source, ThreadRank, Toy
from tests.support.toy_trainer import ToyTrainer, fleet_for_toys, start_engine, toy_trainer
from weightplane.v1 import engine_pb2, lifecycle_pb2, lifecycle_pb2_grpc

pytestmark = pytest.mark.timeout(240)

EXAMPLE = re.compile(r"<!-- run by tests/integration/test_time_sharing.py -->\n```python\n(.*?)```", re.DOTALL)
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
MIB = 1 << 20
DEVICE_BYTES = 8 * MIB
TRAINER_BYTES = 5 * MIB
OPTIMIZER_BYTES = 2 * MIB
KV_BYTES = 4 * MIB
"""Weights are about 1.2 MiB: beside the trainer's, with or without its optimizer, there is no room for a KV cache."""


@asynccontextmanager
async def shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[LocalFleet, ToyTrainer, DeviceMemory]]:
    """A fleet whose engine e0 lives on the trainer's device; e1 has its own."""
    device = DeviceMemory(DEVICE_BYTES)
    monkeypatch.setattr(AccountingEngine, "device", device, raising=False)
    monkeypatch.setattr("engine_agent.daemon.building.MemoryEngine", AccountingEngine)
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        memory = {"device_uuids": (cpu_device_uuid(0),), "kv_bytes": KV_BYTES}
        start_engine(fleet, "e0", **memory)
        await fleet.wait_for_engines(1)
        yield fleet, trainer, device


async def joined(trainer: ToyTrainer, source: Source | None = None) -> ThreadRank:
    return await ThreadRank.join(trainer.directory / "ranks.sock", source or Toy())


class Model:
    """What a training loop calls, with what it takes of the device's memory."""

    def __init__(self, device: DeviceMemory, source: Source) -> None:
        self._device = device
        self._source = source

    def enter_device(self) -> None:
        self._device.set(trainer=TRAINER_BYTES, optimizer=OPTIMIZER_BYTES)

    def step(self, samples: int) -> None:
        self._source.step = samples

    def drop_optimizer(self) -> None:
        self._device.set(optimizer=0)

    def leave_device(self) -> None:
        self._device.set(trainer=0, optimizer=0)


class Rollouts:
    """Asks the engine for tokens, from the loop's thread."""

    def __init__(self, fleet: LocalFleet, loop: asyncio.AbstractEventLoop) -> None:
        self.versions: list[int] = []
        self._fleet = fleet
        self._loop = loop

    def collect(self, step: int) -> int:
        asked = self._fleet.generate("e0", 3)
        _, spans, reason = asyncio.run_coroutine_threadsafe(asked, self._loop).result(60)
        assert reason == "FINISH_REASON_LENGTH"
        self.versions.append(spans[0][0])
        return step


async def test_the_loop_of_the_docs_trains_and_serves_on_one_device_and_never_has_both_in_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shared(tmp_path, monkeypatch) as (fleet, trainer, device):
        found = EXAMPLE.search(OPERATIONS.read_text())
        assert found is not None
        example: dict[str, Any] = {}
        exec(found[1], example)
        source = Toy()
        rank, rollouts = await joined(trainer, source), Rollouts(fleet, asyncio.get_running_loop())
        await asyncio.to_thread(example["train"], rank.rank, Model(device, source), rollouts, 3)
        assert len(set(rollouts.versions)) == 3, "each round under the version of the last"
        assert not [s for s in device.states if {"kv", "trainer"} <= s]
        assert {"weights", "trainer"} in device.states, "installed beside the trainer"
        assert {"trainer", "optimizer"} in device.states, "trained alone"
        assert (await fleet.status("e0")).word == "serving"
        await rank.close()


async def test_inv1_a_push_while_devices_are_taken_is_applied_and_served_when_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shared(tmp_path, monkeypatch) as (fleet, trainer, _):
        rank = await joined(trainer)
        await rank.push(0)
        await asyncio.to_thread(rank.rank.take_devices, 2)
        status = await fleet.status("e0")
        assert (status.word, holds(status)) == ("asleep", {("ASLEEP", "trainer:toy")})
        report = await rank.push(1)
        status = await fleet.status("e0")
        assert status.applied.number == report.version.number
        assert status.residency == engine_pb2.RESIDENCY_WEIGHTS
        assert {kind for kind, _ in holds(status)} == {"ASLEEP", "UNPROVEN"}
        assert not status.gate_open
        await asyncio.to_thread(rank.rank.give_devices)
        await eventually(lambda: _serves(fleet, report.version.number))
        await rank.close()


async def test_an_engine_that_wakes_poisoned_is_named_to_who_gave_its_devices_and_the_next_push_heals_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shared(tmp_path, monkeypatch) as (fleet, trainer, _):
        rank, speaks = await joined(trainer), AccountingEngine.canary
        await rank.push(0)
        await asyncio.to_thread(rank.rank.take_devices, 2)
        await rank.push(1)

        async def wrong(self: AccountingEngine, prompt: Sequence[int] | None = None) -> Canary:
            raise CanaryFailed("e0", "2", "it says nan")

        monkeypatch.setattr(AccountingEngine, "canary", wrong)
        poisoned = await asyncio.to_thread(rank.rank.give_devices)
        assert list(poisoned) == ["e0"]
        assert "it says nan" in poisoned["e0"]
        assert (await fleet.status("e0")).word == "poisoned"
        monkeypatch.setattr(AccountingEngine, "canary", speaks)
        number = (await rank.push(2)).version.number
        await eventually(lambda: _serves(fleet, number))
        assert await asyncio.to_thread(rank.rank.give_devices) == {}
        await rank.close()


async def _are(fleet: LocalFleet, *words: str) -> bool:
    return [(await fleet.status(e)).word for e in ("e0", "e1")] == [*words]


async def _hold(fleet: LocalFleet, number: int) -> bool:
    """Who is asleep is not waited for."""
    return {(await fleet.status(e)).applied.number for e in ("e0", "e1")} == {number}


async def _serves(fleet: LocalFleet, number: int) -> bool:
    status = await fleet.status("e0")
    return status.gate_open and status.applied.number == number


async def test_engines_on_other_devices_serve_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared(tmp_path, monkeypatch) as (fleet, trainer, _):
        monkeypatch.setattr(AccountingEngine, "device", DeviceMemory(DEVICE_BYTES))
        start_engine(fleet, "e1", device_uuids=("CPU-elsewhere",))
        await fleet.wait_for_engines(2)
        rank = await joined(trainer)
        await rank.push(0)
        await asyncio.to_thread(rank.rank.take_devices)
        await eventually(lambda: _are(fleet, "asleep", "serving"))
        await rank.push(1)
        await eventually(lambda: _hold(fleet, 2))
        await asyncio.to_thread(rank.rank.give_devices)
        await rank.close()


async def test_a_trainer_that_dies_with_devices_leaves_them_to_its_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shared(tmp_path, monkeypatch) as (fleet, trainer, _):
        rank = await joined(trainer)
        assert not rank.rank.holds_devices
        await rank.push(0)
        await asyncio.to_thread(rank.rank.take_devices)
        rank.die()
        await asyncio.wait_for(trainer.agent.ended.wait(), 60)
        assert (await fleet.status("e0")).word == "asleep", "nobody else wakes it"
        again = await joined(trainer)
        assert again.rank.holds_devices
        assert (await fleet.view()).trainers[0].status.holds_devices
        await again.push(1)
        await asyncio.to_thread(again.rank.give_devices)
        await eventually(lambda: _serves(fleet, 2))
        await again.close()


async def test_inv7_a_late_sleep_of_a_trainers_dead_life_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was on its way when its ranks died, and arrives after their next life gave the devices back."""
    async with shared(tmp_path, monkeypatch) as (fleet, trainer, _):
        rank = await joined(trainer)
        await rank.push(0)
        await asyncio.to_thread(rank.rank.take_devices)
        rank.die()
        await asyncio.wait_for(trainer.agent.ended.wait(), 60)
        again = await joined(trainer)
        await asyncio.to_thread(again.rank.give_devices)
        await eventually(lambda: _serves(fleet, 1))
        assert await _asks_to_sleep(fleet, lifecycle_pb2.DeviceTurn(term=1, number=1)) == "STALE_TERM"
        term = (await fleet.view()).trainers[0].term
        first = lifecycle_pb2.DeviceTurn(term=term, number=1)
        assert term > 1
        await asyncio.to_thread(again.rank.give_devices)  # it is awake, and hears all the same that this is turn 2
        assert await _asks_to_sleep(fleet, first) == "STALE_TURN"
        assert await _asks_to_sleep(fleet, None) == "INVALID_REQUEST", "a trainer says in which of its turns it asks"
        assert (await fleet.status("e0")).word == "serving"
        await again.close()


async def _asks_to_sleep(fleet: LocalFleet, turn: lifecycle_pb2.DeviceTurn | None) -> str:
    """In its trainer's name; the reason of the refusal."""
    view = await fleet.engine("e0")
    owner = trainer_owner((await fleet.view()).trainers[0].trainer_id)
    stub: Any = lifecycle_pb2_grpc.LifecycleStub(fleet.channel(view.endpoint))
    life: dict[str, Any] = {"run_id": RUN, "engine": view.status.engine}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Sleep(lifecycle_pb2.SleepRequest(**life, owner=owner, level=1, turn=turn), timeout=60)
    return from_rpc_error(refused.value).reason


async def test_a_trainer_that_leaves_gives_its_devices_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared(tmp_path, monkeypatch) as (fleet, trainer, _):
        rank = await joined(trainer)
        await rank.push(0)
        await asyncio.to_thread(rank.rank.take_devices)
        await rank.close()
        await eventually(lambda: _serves(fleet, 1))


async def test_where_one_engine_cannot_sleep_none_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared(tmp_path, monkeypatch) as (fleet, trainer, _):
        monkeypatch.setattr(AccountingEngine, "device", DeviceMemory(DEVICE_BYTES))
        start_engine(fleet, "e1", device_uuids=(cpu_device_uuid(0),), can_sleep=False)
        await fleet.wait_for_engines(2)
        rank = await joined(trainer)
        await rank.push(0)
        with pytest.raises(UnsupportedByEngine, match="e1"):
            await asyncio.to_thread(rank.rank.take_devices)
        await eventually(lambda: _are(fleet, "serving", "serving"))
        assert not (await fleet.view()).trainers[0].status.holds_devices
        await asyncio.to_thread(rank.rank.give_devices)
        await rank.close()


async def test_taking_and_giving_are_idempotent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared(tmp_path, monkeypatch) as (fleet, trainer, _):
        rank = await joined(trainer)
        await rank.push(0)
        for call in (rank.rank.take_devices, rank.rank.take_devices, rank.rank.give_devices, rank.rank.give_devices):
            await asyncio.to_thread(call)
        await eventually(lambda: _serves(fleet, 1))
        await rank.close()


async def test_a_take_that_an_engine_does_not_answer_ends_at_its_limit_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shared(tmp_path, monkeypatch) as (_, trainer, _):
        rank = await joined(trainer)
        await rank.push(0)
        answers = asyncio.Event()

        async def stuck(self: AccountingEngine, level: int) -> None:
            await answers.wait()

        monkeypatch.setattr(AccountingEngine, "sleep", stuck)
        rank.rank._push_seconds = 1.0
        with pytest.raises(DeadlineExceeded, match="take_devices"):
            await asyncio.to_thread(rank.rank.take_devices)
        answers.set()
        rank.rank._push_seconds = 60.0
        await asyncio.to_thread(rank.rank.give_devices)
        await rank.close()

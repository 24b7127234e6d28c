"""Pushes by device memory where something is wrong: what the probe finds, who dies, whose exports are whose.

The memory is a twin between real processes (`tests/support/twin_devices.py`); all else is real. What goes well is in
`tests/contract/test_transports.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from controlplane.device_memory.port import DeviceMemoryError
from controlplane.rpc.metrics import SENT_BYTES
from engine_agent.daemon import building
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.memory.engine import MemorySettings
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.thread_rank import Source, ThreadRank, tokens_of
from tests.support.toy_rank import SHAPES, tensors_of
from tests.support.toy_trainer import fleet_for_toys, toy_trainer
from tests.support.twin_devices import TwinExport, TwinMemory, own_exports
from tests.support.twin_worker import TwinEngine
from trainer_agent.rank import cuda_ipc

pytestmark = pytest.mark.timeout(200)


class Seen(TwinEngine):
    """Every engine that was made, the latest life of each last."""

    made: list[Seen]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.made.append(self)

    def kill_workers(self) -> None:
        for uuid in self._workers:
            os.kill(self.worker_pid(uuid), signal.SIGKILL)


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Seen, "made", [], raising=False)
    monkeypatch.setattr(building, "MemoryEngine", Seen)
    monkeypatch.setattr(cuda_ipc, "devices", TwinMemory())
    yield
    assert own_exports() == []


@asynccontextmanager
async def engines(directory: Path, count: int = 1) -> AsyncIterator[LocalFleet]:
    async with fleet_for_toys(directory, engines=0) as fleet:
        for i in range(count):
            settings = EngineSettings(
                engine_id=f"e{i}",
                coordinator=fleet.address,
                run_id=RUN,
                state_dir=fleet.directory / "engines",
                backend="memory",
                memory=MemorySettings(tensors=SHAPES),
                apply="streaming",
                cpu_devices=(0,),
            )
            fleet._start(f"e{i}", run_engine, settings)
        await fleet.wait_for_engines(count)
        yield fleet


@asynccontextmanager
async def trainer_of(fleet: LocalFleet) -> AsyncIterator[ThreadRank]:
    async with toy_trainer(fleet.address) as trainer:
        rank = await ThreadRank.join(trainer.directory / "ranks.sock", Source(tensors_of))
        try:
            yield rank
        finally:
            await rank.close()


async def holds(fleet: LocalFleet, engine_id: str, step: int) -> bool:
    tokens, _, _ = await fleet.generate(engine_id, 4)
    return tokens == tokens_of(tensors_of(step), 4)


def sent(transport: str) -> float:
    return float(SENT_BYTES.labels(transport)._value.get())


def causes(logs: list[Any]) -> str:
    return " ".join(line["cause"] for line in logs if line["event"] == "transport_avoided")


async def test_a_worker_that_cannot_open_the_memory_says_so_and_the_next_plan_takes_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe comes before anything is touched: the engine serves what it had until it has the version."""
    monkeypatch.setattr(Seen, "memory", partial(TwinMemory, "elsewhere"))
    async with engines(tmp_path) as fleet, trainer_of(fleet) as rank:
        by_device, by_host = sent("cuda_ipc"), sent("shared_memory")
        with capture_logs() as logs:
            report = await rank.push(1)
        assert (report.outcomes, report.version.number) == ({"e0": "APPLIED"}, 2)
        assert "invalid resource handle" in causes(logs)
        assert "install_failed" not in {line["event"] for line in logs}
        assert (sent("cuda_ipc") - by_device, sent("shared_memory") > by_host) == (0.0, True)
        await fleet.settled()
        assert (await rank.push(2)).version.number == 3, "it is not tried again in this life of the engine"
        assert await holds(fleet, "e0", 2)


class Full(TwinMemory):
    def export(self, byte_count: int, device_uuid: str) -> TwinExport:
        raise DeviceMemoryError("cudaMalloc: out of memory (2)")


async def test_a_rank_that_can_export_none_says_so_and_the_next_plan_takes_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "devices", Full())
    async with engines(tmp_path) as fleet, trainer_of(fleet) as rank:
        with capture_logs() as logs:
            assert (await rank.push(1)).outcomes == {"e0": "APPLIED"}
        assert "out of memory" in causes(logs)
        assert await holds(fleet, "e0", 1)


async def test_a_worker_killed_in_mid_chunk_ends_its_engines_life_and_the_next_life_opens_the_memory_anew(
    tmp_path: Path,
) -> None:
    async with engines(tmp_path, 2) as fleet, trainer_of(fleet) as rank:
        await rank.push(1)
        await fleet.settled()
        victim = next(e for e in Seen.made if e._engine_id == "e0")

        def kill(name: str) -> None:
            if name == "layer.1" and not victim._death:
                victim.kill_workers()

        rank.source.before = kill
        report = await rank.push(2)
        assert report.outcomes["e1"] == "APPLIED"
        assert await holds(fleet, "e1", 2)

        async def alive_again() -> bool:
            return (await fleet.engine("e0")).known and len(Seen.made) > 2

        await eventually(alive_again)
        before = sent("cuda_ipc")
        rank.source.before = lambda name: None

        async def both_have_it() -> bool:
            await fleet.settled()
            return (await rank.push(3)).outcomes == {"e0": "APPLIED", "e1": "APPLIED"}

        await eventually(both_have_it)
        assert [await holds(fleet, e, 3) for e in ("e0", "e1")] == [True, True]
        assert sent("cuda_ipc") > before


async def test_g7_the_exports_of_a_trainer_that_left_are_closed_and_the_next_ones_are_opened(tmp_path: Path) -> None:
    async with engines(tmp_path) as fleet:
        for step in (1, 2):
            before = sent("cuda_ipc")
            async with trainer_of(fleet) as rank:
                await fleet.settled()
                assert (await rank.push(step)).outcomes == {"e0": "APPLIED"}
            assert sent("cuda_ipc") > before
            assert await holds(fleet, "e0", step)

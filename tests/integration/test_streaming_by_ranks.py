"""Streaming installs fed by several ranks that read their weights together: who waits for whom, and that it ends.

A rank waits in three places: before it writes chunk k of a ring, for the engines that read its own memory to have read
chunk k - 2; at each chunk of a slot, for the slot's other ranks, in the plan's one order; at each tensor, for all.
An engine's stream waits for chunks of its own leader, for its own install, and for go, which is before the first byte
of a streaming engine and after the last one of a staged one. Of the ranks the one that is furthest behind waits for no
rank, and the engines that it waits for have every chunk that it waits for: that was announced before the next one was
begun. So somebody always moves, but for two circles, each of which stood here once:

- ring, go, a staged engine's last byte, the other rank that makes it, the weights that both make, ring: a plan with a
  staged engine has no leader of a ring that streams (`planner._with_applies`);
- ring, an engine that reads another rank's memory in larger chunks, the weights that both make, ring: a rank's ring
  follows no stream but those that read its own memory (`Announced`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from controlplane.core.errors import WeightplaneError
from engine_agent.daemon import building
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.engine import StagedPart
from engine_agent.memory.engine import MemorySettings
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.thread_rank import tokens_of
from tests.support.thread_ranks import ThreadRanks, own_devices
from tests.support.toy_rank import tensors_of
from tests.support.toy_trainer import SMALL_CHUNK_BYTES, fleet_for_toys, toy_trainer
from tests.support.twin_devices import TwinMemory, own_exports
from tests.support.twin_worker import TwinEngine, make_ready
from trainer_agent.rank import cuda_ipc
from weightplane.v1 import engine_pb2

pytestmark = pytest.mark.timeout(120)
WITHIN = 20.0
"""Seconds in which a push that does not stand still is over, many times; one that does fails."""
IDLE = 2 * WITHIN
"""When an engine gives up waiting for a frame."""
Tensors = Callable[[int], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Fed:
    """An engine, where it is, and by which ways it can be fed."""

    devices: tuple[int, ...]
    """Ranks' own where there is a rank of that number."""
    transports: tuple[str, ...] = ("inline",)
    apply: str = "streaming"

    def settings(self, fleet: LocalFleet, name: str, tensors: Mapping[str, torch.Tensor]) -> EngineSettings:
        return EngineSettings(
            engine_id=name,
            coordinator=fleet.address,
            run_id=RUN,
            state_dir=fleet.directory / "engines",
            backend="memory",
            memory=MemorySettings(tensors={n: tuple(t.shape) for n, t in tensors.items()}),
            stream_idle_seconds=IDLE,
            transports=self.transports,
            apply=self.apply,  # type: ignore[arg-type]
            cpu_devices=self.devices,
        )


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(building, "MemoryEngine", TwinEngine)
    monkeypatch.setattr(cuda_ipc, "devices", TwinMemory())
    own_devices(monkeypatch)
    yield
    assert own_exports() == []


@asynccontextmanager
async def fleet_and_ranks(
    directory: Path,
    engines: Mapping[str, Fed],
    world: int,
    tensors: Tensors = tensors_of,
    chunk_bytes: int = SMALL_CHUNK_BYTES,
    within: float = WITHIN,
    **coordinator: object,
) -> AsyncIterator[tuple[LocalFleet, ThreadRanks]]:
    async with fleet_for_toys(directory, engines=0, **coordinator) as fleet:
        for name, fed in engines.items():
            fleet._start(name, run_engine, fed.settings(fleet, name, tensors(0)))
        await fleet.wait_for_engines(len(engines))
        async with toy_trainer(fleet.address, link_host="127.0.0.1", chunk_bytes=chunk_bytes) as trainer:
            ranks = ThreadRanks(world, tensors, within)
            try:
                await ranks.join(trainer.directory / "ranks.sock")
                yield fleet, ranks
            finally:
                await ranks.close()


class Uneven(TwinEngine):
    """One of them is slow with each part."""

    async def install_part(self, part: StagedPart) -> None:
        if self._engine_id == "slow":
            await asyncio.sleep(0.02)
        await super().install_part(part)


async def holds(fleet: LocalFleet, names: Mapping[str, Fed], tensors: Mapping[str, torch.Tensor]) -> bool:
    expected = tokens_of(tensors, 4)
    said = await asyncio.gather(*(fleet.generate(name, 4) for name in names))
    return [tokens for tokens, _, _ in said] == [expected] * len(names)


async def every_engine_comes_to(step: int, fleet: LocalFleet, ranks: ThreadRanks, engines: Mapping[str, Fed]) -> None:
    await fleet.settled()
    report = await ranks.push(step)
    assert report.outcomes == dict.fromkeys(sorted(engines), "APPLIED")


@pytest.mark.parametrize("staged", ["inline", "shared_memory", "broadcast"])
async def test_a_rank_never_waits_for_go_while_go_waits_for_bytes_that_all_ranks_make(
    tmp_path: Path, staged: str
) -> None:
    engines = {"e0": Fed((8,)), "e1": Fed((9,), ("inline", staged), apply="staged")}
    async with fleet_and_ranks(tmp_path, engines, 2, transport=staged) as (fleet, ranks):
        for step in (1, 2):
            await every_engine_comes_to(step, fleet, ranks, engines)
            assert await holds(fleet, engines, tensors_of(step))


def sixteen(step: int) -> dict[str, torch.Tensor]:
    """Tensors of 3 MiB."""
    return {f"t{i:02}": torch.full((768, 1024), float(step + i)) for i in range(16)}


async def test_ranks_that_cut_alike_or_not_never_wait_for_each_others_chunks(tmp_path: Path) -> None:
    await asyncio.to_thread(make_ready)
    engines = {"e0": Fed((0,), ("cuda_ipc", "inline")), "e1": Fed((9,))}
    async with fleet_and_ranks(tmp_path, engines, 2, sixteen, 16 << 20) as (fleet, ranks):
        await every_engine_comes_to(1, fleet, ranks, engines)
        assert await holds(fleet, engines, sixteen(1))


@pytest.mark.parametrize("transport", ["inline", "shared_memory", "cuda_ipc", "broadcast"])
async def test_slots_that_cross_and_engines_of_any_speed_get_tensors_larger_than_chunks(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is in both slots, and leads for two engines beside them; what goes by links is staged."""
    monkeypatch.setattr(building, "MemoryEngine", Uneven)
    if transport == "cuda_ipc":
        await asyncio.to_thread(make_ready)
    ways = ("inline", transport)
    apart = ("inline",) if transport == "cuda_ipc" else ways
    slots = {"e0": Fed((0, 1), ways), "e1": Fed((1, 2), ways)}
    engines = slots | {name: Fed((8 + i,), apart) for i, name in enumerate(("e2", "e3", "slow"))}
    async with fleet_and_ranks(tmp_path, engines, 3, transport=transport) as (fleet, ranks):
        for step in (1, 2):
            await every_engine_comes_to(step, fleet, ranks, engines)
            assert await holds(fleet, engines, tensors_of(step))


async def test_inv4_ranks_that_stop_after_go_leave_no_engine_standing_still(tmp_path: Path) -> None:
    """Their limit is over, and nobody says anything: the engine is told that its bytes will not come, and says what it
    is, long before it would have given up waiting."""
    stopped = threading.Event()
    async with fleet_and_ranks(tmp_path, {"e0": Fed((8,))}, 1, within=2.0) as (fleet, ranks):

        def stop(name: str) -> None:
            if name == "head":
                stopped.wait(WITHIN)

        ranks.ranks[0].source.before = stop
        pushing = asyncio.create_task(ranks.push(1))

        async def poisoned() -> bool:
            return (await fleet.status("e0")).weights == engine_pb2.WEIGHTS_STATE_POISONED

        try:
            await eventually(poisoned, within=IDLE / 2)
        finally:
            stopped.set()
            with pytest.raises(WeightplaneError):
                await pushing

"""Both sides of a transport, running: the ways from a rank to engine agents, and what leads there.

The real sending side (TrainerRank, in a thread; the trainer agent) and the real receiving side (engine agents) meet
over real gRPC, shared memory and gloo. The engines are in memory: their tokens are a function of each byte installed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.memory.engine import MemorySettings
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.thread_rank import Source, ThreadRank, tokens_of
from tests.support.toy_rank import tensors_of
from tests.support.toy_trainer import SMALL_CHUNK_BYTES, ToyTrainer, fleet_for_toys, toy_trainer
from trainer_agent.rank import PushReport
from trainer_agent.rank.exporter import DTYPES


@dataclass(frozen=True)
class Way:
    """One way, and the settings that lead there."""

    name: str
    coordinator: dict[str, Any] = field(default_factory=dict)
    checkpoints: bool = False
    """The trainer keeps whole versions."""
    devices: bool = False
    """Ranks and workers have device memory, or its twin; what comes is installed as it comes."""


WAYS = [
    Way("shared_memory", {"transport": "shared_memory"}),
    Way("inline_ring", {"transport": "inline"}),
    Way("inline_whole", {"transport": "inline"}, checkpoints=True),
    Way("broadcast_shared", {"transport": "broadcast", "link_fate": "shared"}),
    Way("broadcast_per_engine", {"transport": "broadcast", "link_fate": "per_engine"}),
    Way("cuda_ipc_twin", {"transport": "cuda_ipc"}, devices=True),
]
CHECKPOINT = Way("checkpoint", {"transport": "shared_memory"}, checkpoints=True)
"""Another engine is pushed to; these ones come late, and read what was written of it."""


@dataclass
class Both:
    """Both sides, running."""

    fleet: LocalFleet
    trainer: ToyTrainer
    rank: ThreadRank
    way: Way

    async def push(self, step: int) -> PushReport:
        """Every engine is waited for: their gates are open."""
        await self.fleet.settled()
        return await self.rank.push(step)

    async def bring(self, step: int) -> dict[str, str]:
        """How the weights of `step` came to each engine."""
        return dict((await self.push(step)).outcomes)

    async def holds(self, engine_id: str, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the engine has exactly these bytes."""
        tokens, _, _ = await self.fleet.generate(engine_id, 4)
        return tokens == tokens_of(tensors, 4)

    async def took_nothing(self, engine_id: str, step: int) -> bool:
        """Of an update that failed in the middle: it has the version of before. Where bytes are installed as they come
        it has none, and says so to whoever wants tokens (INV-4)."""
        if not self.way.devices:
            return await self.holds(engine_id, tensors_of(step))
        with pytest.raises(grpc.aio.AioRpcError, match="holds a mixture"):
            await self.fleet.generate(engine_id, 4)
        return await self.fleet.applied(engine_id) is None


@dataclass
class ByCheckpoint(Both):
    """The engines are not there when it is pushed; each step finds them in a new life, with nothing."""

    late: Mapping[str, EngineSettings]

    async def bring(self, step: int) -> dict[str, str]:
        for name in self.late.keys() & self.fleet.tasks.keys():
            await self.fleet.stop(name)
        number = (await self.push(step)).version.number
        for name, settings in self.late.items():
            self.fleet._start(name, run_engine, settings)
        await self.fleet.wait_for_engines(1 + len(self.late))

        async def came() -> bool:
            return {await self.fleet.applied(name) for name in self.late} == {number}

        await eventually(came)
        return dict.fromkeys(self.late, "APPLIED")


@asynccontextmanager
async def both_sides(
    directory: Path,
    way: Way,
    engines: int = 2,
    tensors: Callable[[int], Mapping[str, torch.Tensor]] = tensors_of,
    push_timeout: float = 60.0,
    chunk_bytes: int = SMALL_CHUNK_BYTES,
) -> AsyncIterator[Both]:
    """`engines` in-memory engines that expect what `tensors` gives, and a rank that sends it."""
    settings: dict[str, Any] = {"checkpoint_root": directory / "checkpoints"} if way.checkpoints else {}
    async with fleet_for_toys(directory, engines=0, **way.coordinator) as fleet:
        read = {"checkpoint_root": directory / "checkpoints"} if way is CHECKPOINT else {}
        names = [f"e{i}" for i in range(engines)]
        expected = {n: engine(fleet, n, tensors(0), devices=way.devices, **read) for n in names}
        pushed_to = {"first": engine(fleet, "first", tensors(0))} if way is CHECKPOINT else expected
        for name, its in pushed_to.items():
            fleet._start(name, run_engine, its)
        await fleet.wait_for_engines(len(pushed_to))
        async with toy_trainer(fleet.address, link_host="127.0.0.1", chunk_bytes=chunk_bytes, **settings) as trainer:
            source = Source(tensors)
            rank = await ThreadRank.join(trainer.directory / "ranks.sock", source, push_timeout)
            try:
                sides = (fleet, trainer, rank, way)
                yield ByCheckpoint(*sides, expected) if way is CHECKPOINT else Both(*sides)
            finally:
                await rank.close()


def engine(
    fleet: LocalFleet, engine_id: str, tensors: Mapping[str, torch.Tensor], *, devices: bool = False, **more: Any
) -> EngineSettings:
    """`devices`: it is on the rank's."""
    dtype = DTYPES[next(iter(tensors.values())).dtype]
    if devices:
        more |= {"apply": "streaming", "cpu_devices": (0,)}
    return EngineSettings(
        engine_id=engine_id,
        coordinator=fleet.address,
        run_id=RUN,
        state_dir=fleet.directory / "engines",
        backend="memory",
        memory=MemorySettings(tensors={n: tuple(t.shape) for n, t in tensors.items()}, dtype=dtype),
        stream_idle_seconds=10.0,
        **more,
    )

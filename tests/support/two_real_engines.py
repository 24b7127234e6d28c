"""Two real vLLM engines, each behind an agent process of its own, and a trainer's rank that pushes what it is told.

What engines say is recomputed by transformers: each version's weights are a function of its order's seed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from controlplane.core.sample_spans import Span
from controlplane.rollout.client import RolloutClient
from controlplane.rollout.sample import Sample
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.reference import Reference
from tests.support.tiny_model import make_tiny_model
from tests.support.told_rank import Order, weights
from tests.support.toy_trainer import RankProcess, toy_trainer

ENGINES = ("e0", "e1")
AT_ONCE = 32
"""Requests that an engine runs at once."""
START_SECONDS = 240.0
TOLERANCE = 1e-3
"""Between log probabilities of vLLM and of transformers, both in float32."""


@dataclass
class RealFleet:
    fleet: LocalFleet
    model: Path
    work: Path
    rank: RankProcess
    orders: dict[int, Order] = field(default_factory=dict)
    """By number: what was pushed."""
    agents: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def push(self, order: Order) -> int:
        """Its number."""
        end = await self.rank.tell(order)
        assert end["event"] == "pushed", end
        self.orders[int(end["number"])] = order
        return int(end["number"])

    def client(self, **options: Any) -> RolloutClient:
        return RolloutClient(self.fleet.address, run_id=RUN, **options)

    async def start(self, engine_id: str) -> None:
        """Its agent, or its agent again."""
        values = {
            "engine_id": engine_id,
            "coordinator": self.fleet.address,
            "run_id": RUN,
            "state_dir": self.work / "engines",
            "vllm.model": self.model,
            "vllm.dtype": "float32",
            "vllm.max_model_len": 512,
            "vllm.kv_cache_memory_bytes": 32 << 20,
            "vllm.max_num_seqs": AT_ONCE,
        }
        words = ["--die-with-parent", str(os.getpid())]
        words += [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        with (self.work / f"{engine_id}.log").open("ab") as log:
            self.agents[engine_id] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "controlplane.cli.main", "engine", *words),
                env=environment,
                stdout=log,
                stderr=log,
            )

    def core_of(self, engine_id: str) -> int:
        """The pid of its EngineCore."""
        children = psutil.Process(self.agents[engine_id].pid).children()
        (core,) = [child.pid for child in children if "resource_tracker" not in str(child.cmdline())]
        return core

    async def routable(self, *engine_ids: str) -> None:
        async def all_are() -> bool:
            engines = (await self.fleet.view()).engines
            return {e.status.engine.engine_id for e in engines if e.routable} >= set(engine_ids)

        await eventually(all_are, within=START_SECONDS)

    async def unrouted(self, engine_id: str) -> None:
        """The coordinator knows that nobody is to be sent there."""

        async def is_not() -> bool:
            engines = (await self.fleet.view()).engines
            return engine_id not in {e.status.engine.engine_id for e in engines if e.routable}

        await eventually(is_not, within=START_SECONDS)

    async def known(self, count: int) -> None:
        async def so_many() -> bool:
            return sum(engine.known for engine in (await self.fleet.view()).engines) == count

        await eventually(so_many, within=START_SECONDS)

    async def end(self) -> None:
        for agent in self.agents.values():
            if agent.returncode is None:
                agent.terminate()
        await asyncio.gather(*(asyncio.wait_for(agent.wait(), 60) for agent in self.agents.values()))


@asynccontextmanager
async def two_real_engines(work: Path) -> AsyncIterator[RealFleet]:
    """Started one after the other; nothing was pushed."""
    model, fleet = make_tiny_model(work / "model", 0), LocalFleet(work)
    await fleet.start_coordinator(lease_ttl_seconds=20.0)
    try:
        async with toy_trainer(fleet.address) as trainer:
            (rank,) = await trainer.run_ranks(["tests.support.told_rank", str(model)], world=1)
            real = RealFleet(fleet, model, work, rank)
            try:
                for count, engine_id in enumerate(ENGINES, start=1):
                    await real.start(engine_id)
                    await real.known(count)
                await eventually(lambda: bool(rank.said("listening")), within=180)
                yield real
            finally:
                await real.end()
    finally:
        await fleet.close()


class Recomputed:
    """What each version's own weights say of a sample's tokens."""

    def __init__(self, real: RealFleet) -> None:
        self._orders = real.orders
        self._reference = Reference(real.model)
        self._weights = lru_cache(len(real.orders))(lambda number: weights(real.model, self._orders[number]))
        self._scores = lru_cache(len(real.orders))(self._score)  # of one sample after the other

    def gap(self, number: int, prompt: Sequence[int], sample: Sample, span: Span) -> float:
        """How far the span's log probabilities are, at most, from those of version `number`."""
        truth = self._scores(number, tuple(prompt), sample.tokens)[span.start : span.end]
        return max(abs(a - b) for a, b in zip(sample.logprobs[span.start : span.end], truth, strict=True))

    def _score(self, number: int, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
        return self._reference.score(self._weights(number), prompt, tokens)

    def apart(self, number: int, other: int, text: Sequence[int]) -> list[float]:
        """Of each token of a text but the first: how far two versions' log probabilities of it are apart."""
        one, two = (self._reference.score(self._weights(n), text[:1], text[1:]) for n in (number, other))
        return sorted(abs(a - b) for a, b in zip(one, two, strict=True))

    def neighbours(self, number: int) -> list[int]:
        """The versions before and after it; numbers may be burned in between."""
        numbers = sorted(self._orders)
        place = numbers.index(number)
        return numbers[max(0, place - 1) : place] + numbers[place + 1 : place + 2]

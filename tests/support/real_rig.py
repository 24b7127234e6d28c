"""A real vLLM engine, and a rank in a process of its own that pushes to it what it is told; asked and checked by tests.

See `tests.support.told_rank.Order` for what can be pushed. `real_rig` starts both once, for all tests of a module.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from controlplane.core.errors import WeightplaneError
from controlplane.core.sample_spans import Span
from controlplane.core.sampling import SamplingSettings
from controlplane.failpoints import DIRECTORY_VARIABLE
from controlplane.rollout.client import RolloutClient
from controlplane.rollout.sample import Assembly, Sample
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.vllm.launch import launch
from engine_agent.vllm.settings import VllmSettings, engine_arguments
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.reference import Reference
from tests.support.samples import greedy
from tests.support.told_rank import Order, weights
from tests.support.toy_trainer import RankProcess, ToyTrainer, toy_trainer
from weightplane.v1 import engine_pb2, lifecycle_pb2, lifecycle_pb2_grpc

PROMPT = [5, 6, 7, 8, 9]
COUNT = 12
RUNNING = 32
"""Requests in the engine while it is updated."""
FAILS_AFTER: dict[str, Callable[[int], int]] = {
    "none": lambda _: 0,
    "one": lambda _: 1,
    "half": lambda tensors: tensors // 2,
    "all": lambda tensors: tensors,
}
"""How many of so many tensors were loaded when an install fails."""
START_SECONDS = 240.0
LIMITS = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 32 << 20}
Said = tuple[list[int], list[tuple[int, int, int]]]
"""Tokens, and spans as (number, start, end)."""


@dataclass
class Rig:
    """Engines that live as long as this module, and a rank that pushes to them."""

    fleet: LocalFleet
    rank: RankProcess
    model: Path
    work: Path
    stack: AsyncExitStack
    llms: list[Any]
    """vLLM's own object, of each life."""

    async def push(self, order: Order) -> dict[str, Any]:
        """How it ended, in the rank's words."""
        return await self.rank.tell(order)

    async def rollouts(self) -> RolloutClient:
        return await self.stack.enter_async_context(RolloutClient(self.fleet.address, run_id=RUN))

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [line for line in self.rank.lines if line["event"] in ("pushed", "failed")]

    async def pushed(self, order: Order) -> int:
        """The number, of a push that has to succeed."""
        end = await self.push(order)
        assert end["event"] == "pushed", end
        return int(end["number"])

    async def says(self, engine_id: str = "e0", prompt: Sequence[int] = PROMPT) -> Said:
        return await greedy(self.fleet, engine_id, list(prompt), COUNT)

    def truth(self, order: Order, prompt: Sequence[int] = PROMPT) -> list[int]:
        """transformers' tokens. It loads from a directory: in memory it fuses experts under names of its own."""
        return Reference(self.written(order)).greedy({}, list(prompt), COUNT)[0]

    def written(self, order: Order) -> Path:
        """A model directory with these weights."""
        directory = self.work / f"weights-{order.seed}"
        if not directory.exists():
            directory.mkdir()
            (directory / "config.json").write_text((self.model / "config.json").read_text())
            save_file(weights(self.model, order), directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    async def fresh_says(self, order: Order) -> list[int]:
        """The tokens of a fresh vLLM in a process of its own."""
        directory = self.written(order)
        request = {"prompts": [PROMPT], "max_tokens": COUNT, **LIMITS}
        (directory / "request").write_text(json.dumps(request))
        words = [str(directory), str(directory / "request"), str(directory / "answer")]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "controlplane.cli.demo.reference", *words),
            env={name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 240)
        assert process.returncode == 0, output.decode()[-4000:]
        (answer,) = json.loads((directory / "answer").read_text())
        tokens: list[int] = answer["tokens"]
        return tokens


@asynccontextmanager
async def real_rig(
    work: Path,
    model: Path,
    worker: str,
    environment: dict[str, str],
    *,
    names: tuple[str, ...] = ("e0",),
    vllm: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """`worker`: the class that extends vLLM's workers. `names`: of the engines; `vllm` are their settings, `settings`
    those of their agents. Failpoints are armed in `work/failpoints`."""
    fleet, patch = LocalFleet(work), pytest.MonkeyPatch()
    try:
        await fleet.start_coordinator(lease_ttl_seconds=20.0)
        engine = VllmSettings(model, max_num_seqs=RUNNING, **{**LIMITS, **(vllm or {})})
        extended = {"worker_extension_cls": worker}
        arguments = lambda settings, **how: engine_arguments(settings, **how) | extended  # noqa: E731
        patch.setattr("engine_agent.vllm.launch.engine_arguments", arguments)
        llms: list[Any] = []

        async def noted(*where: Any) -> Any:
            llms.append(await launch(*where))
            return llms[-1]

        patch.setattr("engine_agent.vllm.engine.launch", noted)
        (work / "failpoints").mkdir()
        for name, value in {**environment, DIRECTORY_VARIABLE: str(work / "failpoints")}.items():
            patch.setenv(name, value)
        for name in names:
            agent = EngineSettings(name, fleet.address, RUN, state_dir=work / "engines", vllm=engine, **settings)
            fleet._start(name, run_engine, agent)
        async with toy_trainer(fleet.address) as trainer:
            rank = await _rank(trainer, model)
            await eventually(lambda: _knows(fleet, names), within=START_SECONDS)
            async with AsyncExitStack() as stack:
                yield Rig(fleet, rank, model, work, stack, llms)
    finally:
        await fleet.close()
        patch.undo()


async def _rank(trainer: ToyTrainer, model: Path) -> RankProcess:
    (rank,) = await trainer.run_ranks(["tests.support.told_rank", str(model)], world=1)
    await eventually(lambda: bool(rank.said("listening")), within=120)
    return rank


async def _knows(fleet: LocalFleet, names: tuple[str, ...]) -> bool:
    return {e.status.engine.engine_id for e in (await fleet.view()).engines if e.known} == set(names)


LENGTH = 200


@asynccontextmanager
async def thirty_two(rig: Rig, *, may_fail: bool = False) -> AsyncIterator[list[tuple[list[int], Sample]]]:
    """So many requests are in the engine all the time; what came of them, with their prompts, after the block.
    `may_fail`: another takes the place of one that fails."""
    samples: list[tuple[list[int], Sample]] = []
    some, over = asyncio.Semaphore(0), asyncio.Event()

    async def one(client: RolloutClient, prompt: list[int]) -> None:
        sampling = SamplingSettings(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
        while not over.is_set():
            assembly = Assembly(str(prompt), with_logprobs=True)
            try:
                async for delta in client.stream(prompt, sampling):
                    assembly.add(delta)
                    some.release()
            except WeightplaneError:
                if not may_fail:
                    raise
                continue
            samples.append((prompt, assembly.finish()))

    client = await rig.rollouts()
    async with asyncio.TaskGroup() as group:
        for i in range(RUNNING):
            group.create_task(one(client, [5 + i, 6, 7]))
        for _ in range(2 * RUNNING):
            await some.acquire()
        try:
            yield samples
        finally:
            over.set()


def made_by(rig: Rig, order: Order, sample: Sample, prompt: list[int], span: Span) -> bool:
    """Whether these weights would have chosen just these tokens, or ones as likely."""
    before = [*prompt, *sample.tokens[: span.start]]
    short = Reference(rig.written(order)).shortfalls({}, before, sample.tokens[span.start : span.end])
    return max(short) < 1e-3


async def watch(rig: Rig, seen: list[engine_pb2.EngineStatus]) -> None:
    """The engine's own word at each change, until cancelled."""
    stub = lifecycle_pb2_grpc.LifecycleStub(rig.fleet.channel((await rig.fleet.engine("e0")).endpoint))
    async for response in stub.WatchStatus(lifecycle_pb2.WatchStatusRequest(run_id=RUN)):
        seen += [response.status]

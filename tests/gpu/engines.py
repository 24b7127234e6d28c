"""A real vLLM engine on a GPU, through the engine port, and two versions of its weights."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from controlplane.core.sampling import SamplingSettings
from engine_agent.engine import EngineFacts, StagedPart
from engine_agent.vllm.engine import VllmEngine
from engine_agent.vllm.settings import VllmSettings
from tests.support.staging import stage
from tests.support.tiny_model import make_tiny_model

PROMPT, COUNT = [5, 6, 7, 8, 9], 12
KV_BYTES = 2 << 30
"""Far more than the tiny model: what is free when it sleeps is seen at once."""
State = Mapping[str, Any]
_numbers = itertools.count(1)


@dataclass
class Rig:
    engine: VllmEngine
    facts: EngineFacts
    model: Path
    first: State
    second: State

    async def install(self, state: State) -> None:
        """A whole version. The engine stands still before and after, as in all of these."""
        with stage(state, str(next(_numbers))) as staged:
            await self.engine.install(staged)

    async def stream(self, state: State, parts: int = 3, *, given_up_after: int | None = None) -> None:
        """The same, as it comes; or so many parts of it."""
        label = str(next(_numbers))
        with stage(state, label) as staged:
            count = len(staged.placements)
            await self.engine.begin_streaming(staged.layout, label)
            for i in range(parts if given_up_after is None else given_up_after):
                tensors = range(i * count // parts, (i + 1) * count // parts)
                placements = [staged.placements[t] for t in tensors]
                await self.engine.install_part(StagedPart(staged.chunks, tensors, placements))
            await (self.engine.finish_streaming() if given_up_after is None else self.engine.abandon_streaming())

    async def says(self, count: int = COUNT) -> list[int]:
        """Greedy tokens; the scheduler runs for just that."""
        await self.engine.resume()
        tokens: list[int] = []
        sampling = SamplingSettings(max_tokens=count, temperature=0.0, ignore_eos=True)
        async for delta in self.engine.generate(f"request-{next(_numbers)}", PROMPT, sampling):
            tokens += delta.token_ids
        await self.engine.quiesce()
        return tokens


@asynccontextmanager
async def gpu_engine(directory: Path, **settings: Any) -> AsyncIterator[Rig]:
    """Standing still. Nothing of it runs afterwards."""
    from safetensors.torch import load_file

    model = make_tiny_model(directory, seed=0)
    limits: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": KV_BYTES}
    engine = VllmEngine(VllmSettings(model, dtype="bfloat16", **limits, **settings), "e0")
    facts = await engine.start()
    state = load_file(model / "model.safetensors")
    try:
        await engine.quiesce()
        yield Rig(engine, facts, model, moved(state, 1), moved(state, 2))
    finally:
        await engine.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in facts.pids)


def moved(state: State, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {n: (t.float() + 0.1 * torch.randn(t.shape, generator=generator)).bfloat16() for n, t in state.items()}

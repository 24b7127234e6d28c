"""vLLM's own sleep on a GPU, through the engine port: the memory is free, and what is spoken afterwards is what was
installed.

NOT RUN on hosts without a CUDA device: it says so and skips.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from controlplane.core.engine_sleep import SLEEP
from controlplane.core.sampling import SamplingSettings
from engine_agent.vllm.engine import VllmEngine
from engine_agent.vllm.settings import VllmSettings
from tests.support.staging import stage
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch and vLLM built for CUDA"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
PROMPT, COUNT = [5, 6, 7, 8, 9], 12
KV_BYTES = 2 << 30
"""Far more than the tiny model: what is free when it sleeps is seen at once."""
_labels = itertools.count(1)
State = Mapping[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[VllmEngine, State, State]]:
    """And two versions of its weights."""
    from safetensors.torch import load_file

    model = make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)
    settings = VllmSettings(
        model,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=KV_BYTES,
        enforce_eager=True,
        vllm_arguments={"enable_sleep_mode": True},
    )
    engine = VllmEngine(settings, "e0")
    facts = await engine.start()
    assert SLEEP in facts.capabilities
    state = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    yield engine, moved(state, 1), moved(state, 2)
    await engine.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in facts.pids)


def moved(state: State, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {n: (t.float() + 0.1 * torch.randn(t.shape, generator=generator)).bfloat16() for n, t in state.items()}


async def install(engine: VllmEngine, state: State) -> None:
    with stage(state, str(next(_labels))) as staged:
        await engine.install(staged)


async def says(engine: VllmEngine) -> list[int]:
    """Greedy tokens; the scheduler runs for just that."""
    await engine.resume()
    tokens: list[int] = []
    sampling = SamplingSettings(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    async for delta in engine.generate(f"request-{next(_labels)}", PROMPT, sampling):
        tokens += delta.token_ids
    await engine.quiesce()
    return tokens


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info(0)[0])


async def test_asleep_its_memory_is_free_and_awake_it_says_what_it_said(engine: Any) -> None:
    vllm, first, _ = engine
    await vllm.quiesce()
    await install(vllm, first)
    await vllm.canary()
    before, awake = await says(vllm), free_bytes()
    await vllm.sleep(1)
    assert free_bytes() - awake > 0.9 * KV_BYTES
    await vllm.probe()
    await vllm.wake(kv_cache=True)
    await vllm.canary()
    assert await says(vllm) == before


async def test_what_is_installed_without_a_kv_cache_is_what_is_spoken_when_there_is_one(engine: Any) -> None:
    vllm, first, second = engine
    await vllm.quiesce()
    await install(vllm, second)
    await vllm.canary()
    truth = await says(vllm)
    await install(vllm, first)
    assert await says(vllm) != truth, "the versions must differ, or nothing was proven"
    await vllm.sleep(2)
    asleep = free_bytes()
    await vllm.wake(kv_cache=False)
    assert asleep - free_bytes() < 0.5 * KV_BYTES, "its KV cache is not there"
    await install(vllm, second)
    await vllm.wake(kv_cache=True)
    await vllm.canary()
    assert await says(vllm) == truth


async def test_requests_that_were_kept_go_on_after_waking(engine: Any) -> None:
    vllm, first, _ = engine
    await vllm.quiesce()
    await install(vllm, first)
    truth = await says(vllm)
    await vllm.resume()
    tokens: list[int] = []

    async def speak() -> None:
        sampling = SamplingSettings(max_tokens=200, temperature=0.0, ignore_eos=True)
        async for delta in vllm.generate(f"request-{next(_labels)}", PROMPT, sampling):
            tokens.extend(delta.token_ids)

    speaking = asyncio.create_task(speak())
    while len(tokens) < 4:  # noqa: ASYNC110 - the engine tells nobody else
        await asyncio.sleep(0.001)
    await vllm.quiesce()
    assert len(tokens) < 200, "it was over before"
    await vllm.sleep(1)
    await vllm.wake(kv_cache=True)
    await vllm.resume()
    await asyncio.wait_for(speaking, 60)
    assert (len(tokens), tokens[:COUNT]) == (200, truth)
    await vllm.quiesce()

"""vLLM's own sleep on a GPU, through the engine port: the memory is free, and what is spoken afterwards is what was
installed.

NOT RUN on hosts without a CUDA device: it says so and skips.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from controlplane.core.engine_sleep import SLEEP
from controlplane.core.sampling import SamplingSettings
from tests.gpu.engines import COUNT, KV_BYTES, PROMPT, Rig, gpu_engine

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch and vLLM built for CUDA"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(200),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    arguments = {"enable_sleep_mode": True}
    async with gpu_engine(tmp_path_factory.mktemp("model"), enforce_eager=True, vllm_arguments=arguments) as rig:
        assert SLEEP in rig.facts.capabilities
        yield rig


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info(0)[0])


async def test_asleep_its_memory_is_free_and_awake_it_says_what_it_said(rig: Rig) -> None:
    await rig.install(rig.first)
    await rig.engine.canary()
    before, awake = await rig.says(), free_bytes()
    await rig.engine.sleep(1)
    assert free_bytes() - awake > 0.9 * KV_BYTES
    await rig.engine.probe()
    await rig.engine.wake(kv_cache=True)
    await rig.engine.canary()
    assert await rig.says() == before


async def test_what_is_installed_without_a_kv_cache_is_what_is_spoken_when_there_is_one(rig: Rig) -> None:
    await rig.install(rig.second)
    truth = await rig.says()
    await rig.install(rig.first)
    assert await rig.says() != truth, "the versions must differ, or nothing was proven"
    await rig.engine.sleep(2)
    asleep = free_bytes()
    await rig.engine.wake(kv_cache=False)
    assert asleep - free_bytes() < 0.5 * KV_BYTES, "its KV cache is not there"
    await rig.install(rig.second)
    await rig.engine.wake(kv_cache=True)
    await rig.engine.canary()
    assert await rig.says() == truth


async def test_requests_that_were_kept_go_on_after_waking(rig: Rig) -> None:
    await rig.install(rig.first)
    truth, tokens = await rig.says(200), list[int]()

    async def speak() -> None:
        sampling = SamplingSettings(max_tokens=200, temperature=0.0, ignore_eos=True)
        async for delta in rig.engine.generate("kept", PROMPT, sampling):
            tokens.extend(delta.token_ids)

    await rig.engine.resume()
    speaking = asyncio.create_task(speak())
    while len(tokens) < 4:  # noqa: ASYNC110 - the engine tells nobody else
        await asyncio.sleep(0.001)
    await rig.engine.quiesce()
    assert len(tokens) < 200, "it was over before"
    await rig.engine.sleep(1)
    await rig.engine.wake(kv_cache=True)
    await rig.engine.resume()
    await asyncio.wait_for(speaking, 60)
    await rig.engine.quiesce()
    assert (len(tokens), tokens[:COUNT]) == (200, truth[:COUNT])

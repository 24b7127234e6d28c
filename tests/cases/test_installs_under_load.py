"""No forward pass overlaps an install, on a real vLLM engine with 32 requests in it all the time: one that installs
whole versions, and one that installs them as they come. And what comes of a version that comes in parts.

A worker is one thread, so the interval of an install is that of the whole session: the engine could step between two of
its calls, with half of a version, or under a label that is not its own yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from engine_agent.engine import LiveRequests
from engine_agent.vllm.engine import VllmEngine
from tests.support.eventually import eventually
from tests.support.hf_models import save_random
from tests.support.real_rig import COUNT, FAILS_AFTER, Rig, real_rig, thirty_two, watch
from tests.support.recording_worker import CLASS, FILE_VARIABLE, Interval, read
from tests.support.told_rank import Order, weights
from weightplane.v1 import engine_pb2

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

PUSHES = 3
NEAR_SECONDS = 5.0
"""Within so long of an install there must have been forward passes on both sides: else nothing ran beside it."""
staged = pytest.mark.parametrize("rig", ["staged"], indirect=True)
streaming = pytest.mark.parametrize("rig", ["streaming"], indirect=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["staged", "streaming"])
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    work = tmp_path_factory.mktemp(request.param)
    shape: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 512}
    model = save_random(work / "model", "qwen3", tied=True, **shape)
    recorded = {FILE_VARIABLE: str(work / "intervals")}
    async with real_rig(work, model, CLASS, recorded, apply=request.param) as rig:
        yield rig


def intervals(rig: Rig, what: str, since: int = 0) -> list[Interval]:
    return [x for x in read(rig.work / "intervals")[since:] if x.what == what]


def overlaps(rig: Rig, since: int) -> list[tuple[Interval, Interval]]:
    forwards = intervals(rig, "forward", since)
    return [(f, i) for i in intervals(rig, "install", since) for f in forwards if f.overlaps(i)]


def ran_beside(rig: Rig, install: Interval) -> bool:
    forwards = [f for f in intervals(rig, "forward") if f.worker == install.worker]
    before = any(install.began - NEAR_SECONDS < f.ended <= install.began for f in forwards)
    return before and any(install.ended <= f.began < install.ended + NEAR_SECONDS for f in forwards)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_no_forward_pass_overlaps_an_install(rig: Rig, mode: str) -> None:
    await rig.pushed(Order(seed=100))
    since = len(read(rig.work / "intervals"))
    async with thirty_two(rig) as samples:
        for i in range(PUSHES):
            await rig.pushed(Order(seed=101 + i, pause=(mode, 30.0, "keep")))
    installs = intervals(rig, "install", since)
    assert len(installs) == PUSHES
    assert overlaps(rig, since) == []
    assert all(ran_beside(rig, install) for install in installs)
    assert len(samples) >= 32
    assert (await rig.says())[0] == rig.truth(Order(seed=100 + PUSHES))


@staged
async def test_an_install_that_nobody_stood_still_for_is_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the test above: the scheduler is told nothing, and vLLM is made to say that it stands still."""

    async def nothing(self: VllmEngine) -> LiveRequests:
        return LiveRequests(self._streams.counts())

    async def stands_still(self: Any) -> bool:
        return True

    await rig.pushed(Order(seed=110))
    since = len(read(rig.work / "intervals"))
    with monkeypatch.context() as patch:
        patch.setattr(VllmEngine, "quiesce", nothing)
        patch.setattr("vllm.v1.engine.async_llm.AsyncLLM.is_paused", stands_still)
        async with thirty_two(rig, may_fail=True):
            for i in range(PUSHES):
                await rig.push(Order(seed=111 + i))
    assert overlaps(rig, since)
    number = await rig.pushed(Order(seed=114))
    assert await rig.says() == (rig.truth(Order(seed=114)), [(number, 0, COUNT)])


@streaming
async def test_a_version_that_comes_in_parts_says_what_transformers_says(rig: Rig) -> None:
    tokens = []
    for seed in (121, 122, 123):
        number = await rig.pushed(Order(seed))
        said = await rig.says()
        assert said == (rig.truth(Order(seed)), [(number, 0, COUNT)])
        tokens.append(tuple(said[0]))
    assert len(set(tokens)) == 3, "neighbouring versions must differ, or nothing was proven"


@streaming
@pytest.mark.parametrize("share", FAILS_AFTER)
async def test_P1_a_stream_that_fails_after_some_tensors_poisons_and_shuts_and_the_next_push_heals(
    rig: Rig, share: str
) -> None:
    """A push repeats itself: its second attempt is the next push."""
    before = await rig.pushed(Order(131))
    seen: list[engine_pb2.EngineStatus] = []
    watching = asyncio.create_task(watch(rig, seen))
    last = len(weights(rig.model, Order(131))) - 1
    (rig.work / "failpoints" / "worker.install").write_text(f"raise after={FAILS_AFTER[share](last)}")
    async with thirty_two(rig, may_fail=True):
        number = await rig.pushed(Order(132))
    await eventually(lambda: any(s.gate_open and s.applied.number == number for s in seen), within=20)
    watching.cancel()
    poisoned = [s for s in seen if s.weights == engine_pb2.WEIGHTS_STATE_POISONED]
    assert poisoned, "it was never seen poisoned"
    assert not any(s.gate_open or s.HasField("applied") for s in poisoned)
    assert {s.applied.number for s in seen if s.gate_open} <= {before, number}
    assert (await rig.fleet.engine("e0")).status.refused.reason == "INSTALL_FAILED"
    assert number == before + 2
    assert await rig.says() == (rig.truth(Order(132)), [(number, 0, COUNT)])

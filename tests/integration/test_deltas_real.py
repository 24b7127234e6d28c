"""Real vLLM: after a delta it speaks, token by token and logprob by logprob, as after a whole update of the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_agent.vllm.settings import VllmSettings
from tests.support.checkpoint_fleet import routable, start_engine
from tests.support.deltas_by_hand import Opened, watch_opens
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.obedient import ObedientRanks
from tests.support.tiny_model import make_tiny_model
from tests.support.toy_trainer import fleet_for_toys, toy_trainer
from weightplane.v1 import rollout_pb2, rollout_pb2_grpc

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]
PROMPT = [5, 6, 7, 8, 9]
TOKENS = 16
START_SECONDS = 150.0


async def started(fleet: LocalFleet) -> bool:
    return sum(e.known for e in (await fleet.view()).engines) == 2


async def words(fleet: LocalFleet, engine_id: str) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log probabilities."""
    view = await fleet.engine(engine_id)
    stub: Any = rollout_pb2_grpc.RolloutStub(fleet.channel(view.endpoint))
    sampling = rollout_pb2.SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    request = rollout_pb2.GenerateRequest(run_id=RUN, model="policy", prompt_token_ids=PROMPT, sampling=sampling)
    tokens: list[int] = []
    logprobs: list[float] = []
    async for response in stub.Generate(request, timeout=60):
        tokens += response.token_ids
        logprobs += response.logprobs
    return tokens, logprobs


async def test_after_each_of_three_deltas_vllm_speaks_as_after_a_whole_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Opened] = watch_opens(monkeypatch)
    model = make_tiny_model(tmp_path / "model", 1, dtype="bfloat16")
    vllm = VllmSettings(model=model, dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=32 << 20)
    async with fleet_for_toys(tmp_path, engines=0, transport="inline") as fleet:
        for engine_id, deltas in (("patched", True), ("whole", False)):
            start_engine(fleet, engine_id, backend="vllm", vllm=vllm, deltas=deltas)
        await eventually(lambda: started(fleet), within=START_SECONDS)
        async with toy_trainer(fleet.address) as trainer:
            ranks = await ObedientRanks.start(trainer, 1, deltas=True, model_directory=str(model))
            before = None
            for step in range(1, 5):
                (said,) = await ranks.all("learn_and_push", step=step, elements=50)
                assert said["status"] == "COMMITTED"
                for engine_id in ("patched", "whole"):
                    await routable(fleet, engine_id, step)
                patched, whole = [await words(fleet, e) for e in ("patched", "whole")]
                assert len(patched[0]) == len(patched[1]) == TOKENS
                assert patched == whole
                assert patched != before
                before = patched
            assert await ranks.leave() == [0]
    assert [base for _, engine_id, base in opened if engine_id == "patched"] == [None, 1, 2, 3]
    assert [base for _, engine_id, base in opened if engine_id == "whole"] == [None] * 4

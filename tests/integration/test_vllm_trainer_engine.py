"""vLLM's own factory and `ModuleSource`, our trainer engine and client, and a real vLLM engine behind its agent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.vllm.settings import VllmSettings
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.reference import Reference
from tests.support.samples import greedy
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_rank import TinyWeights
from tests.support.toy_trainer import RankProcess

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(400)]
UPDATES = 3
PROMPT = [5, 6, 7, 8, 9]
START_SECONDS = 200.0


async def test_what_vllms_own_trainer_code_sends_is_served_under_the_coordinators_numbers(tmp_path: Path) -> None:
    """Each of three updates, the last one by the client's four calls, against the same weights in transformers."""
    model = make_tiny_model(tmp_path / "model", 0)
    weights, truth = TinyWeights(model), Reference(model)
    fleet = LocalFleet(tmp_path)
    rank: RankProcess | None = None
    try:
        await fleet.start_coordinator(lease_ttl_seconds=20.0)
        _start_vllm(fleet, model)
        await eventually(lambda: _knows_the_engine(fleet), within=START_SECONDS)
        command = ["tests.support.vllm_sends", fleet.address, str(model), str(tmp_path), str(UPDATES)]
        clean = {name: "" for name in os.environ if name.startswith("VLLM_")}
        rank = await RankProcess.run(command, {"WEIGHTPLANE_RUN_ID": RUN, **clean})
        for step in range(1, UPDATES + 1):
            await eventually(lambda step=step, rank=rank: len(rank.said("sent")) == step, within=120)  # type: ignore[misc]
            sent = rank.said("sent")[-1]
            assert sent["step"] == step
            tokens, spans = await greedy(fleet, "e0", PROMPT, 12)
            assert tokens == truth.greedy(weights.tensors_of(step), PROMPT, 12)[0]
            assert spans == [(sent["version"], 0, 12)]
            (tmp_path / f"next-{step}").touch()
        assert await rank.code() == 0
        assert [sent["version"] for sent in rank.said("sent")] == [1, 2, 3]
    finally:
        if rank is not None:
            rank.kill()
        await fleet.close()


def _start_vllm(fleet: LocalFleet, model: Path) -> None:
    vllm = VllmSettings(model=model, dtype="float32", max_model_len=128, kv_cache_memory_bytes=32 << 20)
    settings = EngineSettings("e0", fleet.address, RUN, state_dir=fleet.directory / "engines", vllm=vllm)
    fleet._start("e0", run_engine, settings)


async def _knows_the_engine(fleet: LocalFleet) -> bool:
    return any(e.known for e in (await fleet.view()).engines)

"""The main job on real parts: Megatron trains (tied embeddings too), pushes, and vLLM says what a fresh engine says.

M4: three updates, each compared. M1: the embedding is trained, so a stale tied `lm_head` would show.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.vllm.settings import VllmSettings
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.tiny_model import make_tiny_model
from trainer_agent.agent import run_trainer
from trainer_agent.agent.settings import TrainerSettings
from weightplane.v1 import operator_pb2

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

PUSHES = 3
MAX_TOKENS = 12
MAX_MODEL_LEN = 128
KV_BYTES = 32 << 20
TOLERANCE = 1e-3
"""Natural log, float32: the same tokens in another batch differ by 1e-6; other weights by more than 0.1."""
PROMPTS = [[5, 6, 7, 8, 9], [17, 3, 99, 100, 101, 102], list(range(10, 70)), [200]]


@pytest.mark.parametrize(
    ("tensor_parallel", "pipeline_parallel", "transport", "workers"), [(2, 1, "shared_memory", 2), (1, 2, "inline", 1)]
)
async def test_m1_m4_after_each_of_three_pushes_the_engine_equals_a_fresh_one(
    tmp_path: Path, tensor_parallel: int, pipeline_parallel: int, transport: str, workers: int
) -> None:
    """With two workers the ranks are a slot: each rank's memory feeds the worker on its device."""
    model = make_tiny_model(tmp_path / "model", 0)
    fleet = LocalFleet(tmp_path)
    try:
        await fleet.start_coordinator(transport=transport, lease_ttl_seconds=20.0)
        _start_vllm(fleet, model, workers)
        await eventually(lambda: _knows_an_engine(fleet), within=240)
        command = ["-m", "tests.support.megatron_pushes", str(model), str(tmp_path)]
        command += [str(tensor_parallel), str(pipeline_parallel), str(PUSHES)]
        settings = TrainerSettings(fleet.address, run_id=RUN, nproc_per_node=2, max_restarts=0)
        trainer = asyncio.create_task(run_trainer(settings, command))
        said = [await _after_push(fleet, tmp_path, number, trainer) for number in range(1, PUSHES + 1)]
        assert await asyncio.wait_for(trainer, 60) == 0
    finally:
        await fleet.close()
    for number, answers in enumerate(said, 1):
        fresh = await _fresh(tmp_path / f"weights-{number}", tmp_path)
        assert [a["tokens"] for a in answers] == [f["tokens"] for f in fresh]
        assert _gap(answers, fresh) < TOLERANCE
    assert _gap(said[0], said[1]) > 100 * TOLERANCE, "neighbouring versions must differ, or nothing was proven"


def _start_vllm(fleet: LocalFleet, model: Path, workers: int) -> None:
    vllm = VllmSettings(
        model=model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=len(PROMPTS),
        tensor_parallel_size=workers,
        kv_cache_memory_bytes=KV_BYTES,
    )
    settings = EngineSettings(
        engine_id="e0",
        coordinator=fleet.address,
        run_id=RUN,
        state_dir=fleet.directory / "engines",
        vllm=vllm,
        cpu_devices=tuple(range(workers)),
    )
    fleet._start("e0", run_engine, settings)


async def _knows_an_engine(fleet: LocalFleet) -> bool:
    view: operator_pb2.FleetView = await fleet.view()
    return any(e.known for e in view.engines)


async def _after_push(
    fleet: LocalFleet, work: Path, number: int, trainer: asyncio.Task[int]
) -> list[dict[str, list[float]]]:
    """What the engine says under the version just pushed; then the trainer may go on."""

    def is_pushed() -> bool:
        assert not trainer.done(), f"the trainer ended with {trainer.result()}"
        return (work / f"pushed-{number}").exists()

    await eventually(is_pushed, within=240)
    sampling = SamplingSettings(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    async with RolloutClient(fleet.address, run_id=RUN) as client:
        samples = await asyncio.gather(*(client.generate(p, sampling) for p in PROMPTS))
    assert [[(s.version.number, s.start, s.end) for s in sample.spans] for sample in samples] == [
        [(number, 0, MAX_TOKENS)] for _ in PROMPTS
    ]
    (work / f"next-{number}").touch()
    return [{"tokens": list(s.tokens), "logprobs": list(s.logprobs)} for s in samples]


async def _fresh(weights: Path, work: Path) -> list[dict[str, list[float]]]:
    """A fresh vLLM in a process of its own, loading the exported checkpoint, says the same prompts in one batch."""
    request = {
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": KV_BYTES,
    }
    (work / "request.json").write_text(json.dumps(request))
    arguments = ["-m", "controlplane.cli.demo.reference", str(weights), "request.json", "answer.json"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=work,
        env=_clean_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, output.decode()[-4000:]
    answers: list[dict[str, list[float]]] = json.loads((work / "answer.json").read_text())
    return answers


def _clean_environment() -> dict[str, str]:
    """Without what the engine under test, which lives in this process, has set for itself."""
    return {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}


def _gap(one: list[dict[str, list[float]]], other: list[dict[str, list[float]]]) -> float:
    """Largest difference of a logprob. Under other weights the tokens differ too, which widens it."""
    return max(
        abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x["logprobs"], y["logprobs"], strict=True)
    )

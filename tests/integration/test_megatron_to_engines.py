"""A part of the sweep that ends in tokens: four real Megatron ranks, split in several ways, push to real vLLM engines
of one worker and of two, which then say what transformers says with the same weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.vllm.settings import VllmSettings
from tests.support.eventually import eventually
from tests.support.hf_models import checkpoint, save_random
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.megatron_moves import moved
from tests.support.reference import Reference
from tests.support.samples import greedy
from tests.support.toy_trainer import RankProcess, toy_trainer
from tests.sweep.topology import Topology

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

RANKS, PUSHES, COUNT = 4, 3, 10
PROMPTS = [[5, 6, 7, 8, 9], [17, 3, 99, 100, 101, 102], [200]]
START_SECONDS = 400.0
ENGINES = {"one": (3,), "two": (1, 2)}
"""Devices of their workers: those of these ranks."""
DENSE = [{"tensor": 2, "pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2, "context": 2}, {"tensor": 4}]
WITH_EXPERTS = [
    {"tensor": 2, "expert": 2, "expert_tensor": 1},
    {"pipeline": 2, "expert": 2},
    {"expert": 4},
]


HEAD_32: dict[str, Any] = {"head_dim": 32}
"""The least head size that vLLM's attention takes on a CPU."""
CHANGES: dict[str, dict[str, Any]] = {"qwen2_moe": {"num_attention_heads": 2, "num_key_value_heads": 1}}
"""Whose heads have the size that is left by their number."""


def topologies(family: str, tied: bool, sizes: Sequence[dict[str, int]]) -> list[Topology]:
    return [Topology(RANKS, family, tied, **s) for s in sizes]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("split", "transport"),
    [
        (topologies("qwen3", True, [{"expert_tensor": s.get("tensor", 1), **s} for s in DENSE]), "shared_memory"),
        (topologies("qwen3_moe", False, WITH_EXPERTS), "shared_memory"),
        (topologies("qwen3_moe", True, WITH_EXPERTS[:1]), "inline"),
        (topologies("mixtral", False, WITH_EXPERTS[1:2]), "broadcast"),
        (topologies("qwen2_moe", True, WITH_EXPERTS[1:2]), "broadcast"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0].family,
)
async def test_engines_of_one_and_two_workers_say_what_transformers_says_after_each_push(
    tmp_path: Path, split: list[Topology], transport: str
) -> None:
    family = split[0].family
    model = save_random(tmp_path / "model", family, tied=split[0].tied, **CHANGES.get(family, HEAD_32))
    fleet = LocalFleet(tmp_path)
    try:
        await fleet.start_coordinator(transport=transport, lease_ttl_seconds=60.0)
        for engine_id, devices in ENGINES.items():
            _start_vllm(fleet, engine_id, devices, model)
        async with toy_trainer(fleet.address, link_host="127.0.0.1") as trainer:
            await eventually(lambda: _known(fleet), within=START_SECONDS)
            command = ["tests.support.megatron_moves", str(model), str(tmp_path), str(PUSHES)]
            command.append(json.dumps([t.to_json() for t in split]))
            # vLLM sets this one in its front end's process, which is this one too.
            ranks = await trainer.run_ranks(command, RANKS, LOCAL_WORLD_SIZE=str(RANKS))
            for number in range(len(split)):
                for push in range(1, PUSHES + 1):
                    version = await _pushed(tmp_path / f"pushed-{number}-{push}", ranks)
                    truth = await asyncio.to_thread(_truth, model, push, tmp_path)
                    for engine_id in ENGINES:
                        said = [await greedy(fleet, engine_id, prompt, COUNT) for prompt in PROMPTS]
                        assert [spans for _, spans in said] == [[(version, 0, COUNT)]] * len(PROMPTS)
                        assert [tokens for tokens, _ in said] == truth, (split[number].name, push, engine_id)
                    (tmp_path / f"next-{number}-{push}").touch()
            assert [await rank.code() for rank in ranks] == [0] * RANKS
    finally:
        await fleet.close()


def _start_vllm(fleet: LocalFleet, engine_id: str, devices: tuple[int, ...], model: Path) -> None:
    vllm = VllmSettings(
        model,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        tensor_parallel_size=len(devices),
        kv_cache_memory_bytes=32 << 20,
    )
    settings = EngineSettings(
        engine_id, fleet.address, RUN, state_dir=fleet.directory / "engines", vllm=vllm, cpu_devices=devices
    )
    fleet._start(engine_id, run_engine, settings)


async def _known(fleet: LocalFleet) -> bool:
    return sum(engine.known for engine in (await fleet.view()).engines) == len(ENGINES)


async def _pushed(file: Path, ranks: Sequence[RankProcess]) -> int:
    """The version's number, once rank 0 was told of it."""

    def is_there() -> Any:
        if any(rank.process.returncode is not None for rank in ranks):
            raise RuntimeError("a rank ended")
        return file.exists() or None

    await eventually(is_there, within=180)
    return int(file.read_text())


def _truth(model: Path, push: int, work: Path) -> list[list[int]]:
    """transformers' tokens. It loads from a directory: in memory it fuses experts under names of its own."""
    directory = work / f"moved-{push}"
    if not directory.exists():
        directory.mkdir()
        (directory / "config.json").write_text((model / "config.json").read_text())
        save_file(moved(checkpoint(model), push), directory / "model.safetensors", metadata={"format": "pt"})
    reference = Reference(directory)
    return [reference.greedy({}, prompt, COUNT)[0] for prompt in PROMPTS]

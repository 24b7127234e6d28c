"""The processes of a demo and their settings: one coordinator, two engine agents, one trainer agent with two ranks.

Each engine and each rank has a device of its own number: rank 0 shares engine-0's, rank 1 engine-1's, as on a node
whose trainer and engines are colocated. Each engine computes on one core, so that two of them do not fight for both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controlplane.cli.crew import Child, Crew
from controlplane.cli.demo.places import Places
from controlplane.cli.demo.settings import DemoModel, DemoSettings
from controlplane.cli.demo.verify import KV_CACHE_BYTES, MAX_MODEL_LEN

ENGINES = 2
RANKS = 2
MAX_SEQUENCES = 16
"""Half of a step's samples, and half of the held-out prompts."""
MAX_RESTARTS = 2
"""Of the ranks, of each engine: the demo heals as a fleet does, but not for ever."""

_QUIET_MATHS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
"""Spinning threads of one process make another's small operations many times slower."""


def environment(places: Places) -> dict[str, str]:
    """Common to all: quiet maths, and temporary files where they are removed with the demo."""
    return _QUIET_MATHS | {"TMPDIR": str(places.scratch)}


async def start_coordinator(crew: Crew, places: Places, settings: DemoSettings, run_id: str) -> Child:
    config = {
        "listen": settings.listen,
        "run_id": run_id,
        "state_dir": str(places.state / "coordinator"),
        "address_file": str(places.address),
        "web_listen": "127.0.0.1:0",
        "web_address_file": str(places.page),
    }
    return await _start(crew, places, "coordinator", "coordinator", config)


async def start_engine(crew: Crew, places: Places, number: int, *, model: Path, coordinator: str, run_id: str) -> Child:
    cores = sorted(os.sched_getaffinity(0))
    config = {
        "engine_id": f"engine-{number}",
        "coordinator": coordinator,
        "run_id": run_id,
        "state_dir": str(places.state),
        "cpu_devices": [number],
        "max_restarts": MAX_RESTARTS,
        "vllm": {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_SEQUENCES,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "cpu_bind": str(cores[number % len(cores)]),
        },
    }
    return await _start(crew, places, f"engine-{number}", "engine", config)


async def start_trainer(
    crew: Crew, places: Places, settings: DemoSettings, *, model: Path, coordinator: str, run_id: str
) -> Child:
    config = {
        "coordinator": coordinator,
        "run_id": run_id,
        "trainer_id": "trainer",
        "nproc_per_node": RANKS,
        "max_restarts": MAX_RESTARTS,
        "state_dir": str(places.state),
    }
    script = ["-m", "trainer_agent.demo.grpo", *_training_options(places, settings, model)]
    return await _start(crew, places, "trainer", "trainer", config, "--", *script)


def _training_options(places: Places, settings: DemoSettings, model: Path) -> list[str]:
    # SmolLM2's 9 heads cannot be split over two ranks, its 30 layers can; the tiny model's 4 heads can.
    split = "--pipeline-parallel" if settings.model is DemoModel.SMOLLM2 else "--tensor-parallel"
    options = {
        "--model-dir": model,
        "--checkpoint-dir": places.checkpoints,
        "--events": places.events,
        "--export-dir": places.exported,
        "--steps": settings.steps,
        "--seed": settings.seed,
        split: RANKS,
    }
    return [word for name, value in options.items() for word in (name, str(value))]


async def _start(crew: Crew, places: Places, name: str, command: str, config: Mapping[str, Any], *rest: str) -> Child:
    file = places.work / f"{name}.toml"
    file.write_text(_toml(config))
    return await crew.weightplane(name, command, "--config", str(file), *rest)


def _toml(config: Mapping[str, Any]) -> str:
    """Text, numbers and lists are written alike in TOML and JSON; a table comes last, under its own head."""
    flat = [f"{key} = {json.dumps(value)}" for key, value in config.items() if not isinstance(value, Mapping)]
    tables = [f"\n[{key}]\n{_toml(value)}" for key, value in config.items() if isinstance(value, Mapping)]
    return "\n".join([*flat, *tables]) + "\n"

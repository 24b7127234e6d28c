"""The environment and the arguments of an engine, without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.errors import UnsupportedByEngine
from controlplane.processes import start_time
from engine_agent.lineage import AGENT_PID_VARIABLE, AGENT_START_VARIABLE
from engine_agent.vllm.engine import VllmEngine
from engine_agent.vllm.environment import KEPT_HEAP, engine_environment
from engine_agent.vllm.settings import OWN_ARGUMENTS, VllmSettings, engine_arguments

SETTINGS = VllmSettings(Path("/models/m"))


def environment(*, gpu: bool = False, settings: VllmSettings = SETTINGS, **base: str) -> dict[str, str]:
    return engine_environment(settings, gpu=gpu, log_config=Path("/log.json"), base=base)


def test_the_insecure_switch_is_never_passed_on() -> None:
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment(VLLM_ALLOW_INSECURE_SERIALIZATION="1")


def test_an_engine_is_tied_to_this_process() -> None:
    made = environment()
    assert made[AGENT_PID_VARIABLE] == str(os.getpid())
    assert made[AGENT_START_VARIABLE] == str(start_time(os.getpid()))


def test_processes_are_spawned_because_grpc_does_not_survive_a_fork() -> None:
    assert environment(VLLM_WORKER_MULTIPROC_METHOD="fork")["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_a_cpus_settings_stay_on_cpus() -> None:
    on_cpu, on_gpu = environment(), environment(gpu=True)
    assert on_cpu.keys() - on_gpu.keys() == {
        "TORCHDYNAMO_DISABLE",
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "VLLM_CPU_OMP_THREADS_BIND",
        *KEPT_HEAP,
    }


def test_who_tunes_the_allocator_is_left_to_it() -> None:
    made = environment(MALLOC_PERTURB_="2")
    assert made["MALLOC_PERTURB_"] == "2"
    assert not made.keys() & KEPT_HEAP.keys()


def test_the_kv_cache_has_the_size_of_the_settings_not_of_the_environment() -> None:
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(VLLM_CPU_KVCACHE_SPACE="40")


def test_batch_invariance_is_asked_of_vllm_where_the_settings_have_it_and_else_left_as_it_is() -> None:
    asked = environment(gpu=True, settings=replace(SETTINGS, batch_invariant=True))
    assert asked["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in environment(gpu=True)


async def test_what_vllm_does_not_have_on_a_cpu_is_refused_by_name_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine_agent.vllm.engine.gpu_present", lambda: False)
    engine = VllmEngine(replace(SETTINGS, batch_invariant=True), "e0")
    with pytest.raises(UnsupportedByEngine, match="batch_invariant"):
        await engine.start()
    await engine.shutdown()


def test_the_rest_of_the_environment_is_kept() -> None:
    assert environment(LD_PRELOAD="libtcmalloc.so")["LD_PRELOAD"] == "libtcmalloc.so"


@pytest.mark.parametrize(("before", "after"), [("a,b", "a,b,weightplane"), ("weightplane", "weightplane")])
def test_a_list_of_allowed_plugins_gets_ours(before: str, after: str) -> None:
    assert environment(VLLM_PLUGINS=before).get("VLLM_PLUGINS", before) == after


def test_the_canary_has_a_place_of_its_own_in_the_batch() -> None:
    assert engine_arguments(VllmSettings(Path("m"), max_num_seqs=8), gpu=False)["max_num_seqs"] == 9


def test_short_prompts_are_cached_and_nothing_is_compiled_on_a_cpu() -> None:
    on_cpu, on_gpu = (engine_arguments(SETTINGS, gpu=gpu) for gpu in (False, True))
    assert (on_cpu["block_size"], on_cpu["enforce_eager"]) == (32, True)
    assert ("block_size" in on_gpu, on_gpu["enforce_eager"]) == (False, False)


def test_more_arguments_are_passed_through() -> None:
    settings = VllmSettings(Path("m"), vllm_arguments={"max_num_batched_tokens": 512})
    assert engine_arguments(settings, gpu=False)["max_num_batched_tokens"] == 512


@pytest.mark.parametrize("name", sorted(OWN_ARGUMENTS))
def test_arguments_that_the_contract_rests_on_cannot_be_set(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        VllmSettings(Path("m"), vllm_arguments={name: 1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_uuids": ("a",), "tensor_parallel_size": 2},
        {"device_uuids": ("a", "a"), "tensor_parallel_size": 2},
        {"device_uuids": ("a", "b"), "tensor_parallel_size": 2, "vllm_arguments": {"pipeline_parallel_size": 2}},
        {"cpu_threads": 0},
        {"max_num_seqs": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"device_uuids|at least 1"):
        VllmSettings(Path("m"), **wrong)


def test_asking_for_an_environment_imports_neither_torch_nor_vllm() -> None:
    """So that the agent never initialises a GPU, and starts at once."""
    code = (
        "import sys, engine_agent.vllm.engine, engine_agent.vllm.environment, engine_agent.vllm.plugin\n"
        "engine_agent.vllm.environment.gpu_present()\n"
        "assert not {'torch', 'vllm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""The environment of one engine's processes, made before vLLM is imported.

Promises every variable with its reason, and settings for CPUs only where there is no GPU. Refuses the
insecure-serialization switch: nothing here is ever unpickled from outside. Imports neither torch nor vLLM,
so asking about the machine initialises no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from engine_agent.lineage import agent_identity
from engine_agent.vllm.plugin import ENTRY_POINT_NAME
from engine_agent.vllm.settings import VllmSettings

GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""NVIDIA's and AMD's control devices."""

KEPT_HEAP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
}
"""glibc keeps what was freed, and takes large blocks from it: an install takes and frees the whole model on its way,
and pages that are new to a process cost several times what a copy does. One heap for all threads, since those that
threads have of their own (the one that packs) are given back in pieces of 64 MiB all the same. Of no effect under
another allocator."""


def gpu_present() -> bool:
    """Whether this machine has a GPU that vLLM would take, without loading a driver library."""
    return any(Path(p).exists() for p in GPU_DEVICE_FILES)


def engine_environment(
    settings: VllmSettings, *, gpu: bool, log_config: Path, base: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment for an engine's processes: `base`, less what must not be set, plus what must."""
    refused = {"VLLM_ALLOW_INSECURE_SERIALIZATION"}  # pickles over RPC: code from whoever reaches the socket
    wanted = {
        # the model is a local directory; a lookup would hang where there is no network
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # nothing of a run leaves the site
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # gRPC runs in the agent, and fork() under it hangs the child and can break the parent
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, round(settings.start_timeout_seconds))),
        "VLLM_LOGGING_CONFIG_PATH": str(log_config),
        "VLLM_LOGGING_LEVEL": settings.log_level,
        **agent_identity(),
    }
    if "VLLM_PLUGINS" in base and ENTRY_POINT_NAME not in base["VLLM_PLUGINS"].split(","):
        wanted["VLLM_PLUGINS"] = f"{base['VLLM_PLUGINS']},{ENTRY_POINT_NAME}"
    if settings.node_address:
        wanted["VLLM_HOST_IP"] = settings.node_address
    if settings.batch_invariant:
        wanted["VLLM_BATCH_INVARIANT"] = "1"
    if settings.visible_devices:
        wanted["CUDA_VISIBLE_DEVICES"] = ",".join(settings.visible_devices)
    if not gpu:
        wanted |= _cpu_variables(settings)
        if not any(name.startswith("MALLOC_") for name in base):
            wanted |= KEPT_HEAP
        refused.add("VLLM_CPU_KVCACHE_SPACE")  # whole GiB, and it would override kv_cache_memory_bytes
    return {k: v for k, v in base.items() if k not in refused} | wanted


def apply(environment: Mapping[str, str]) -> None:
    """Make `environment` this process's own, since vLLM and its spawned children read it from there."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _cpu_variables(settings: VllmSettings) -> dict[str, str]:
    return {
        # else the first request with logprobs compiles for 4 to 21 s, the engine blocked meanwhile
        "TORCHDYNAMO_DISABLE": "1",
        # processes with spinning threads make each other's small operations 15 to 75 times slower
        "OMP_NUM_THREADS": str(settings.cpu_threads),
        "OMP_WAIT_POLICY": "passive",
        # "auto" would bind every engine of this machine to the same cores
        "VLLM_CPU_OMP_THREADS_BIND": settings.cpu_bind,
    }

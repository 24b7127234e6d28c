"""vLLM in a Ray actor, which gets weights as Ray brings them: `put` into the object store, a call with the reference.

The actor owns vLLM's `LLM` in its own process, so that the arrays of the store are read in place by the load itself.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch

from bench.real.fleet import ENVIRONMENT, VLLM
from bench.real.weights import Tensors

STORE_BYTES = 1 << 30
START_SECONDS = 300.0
ACTOR_ENVIRONMENT = {
    **ENVIRONMENT,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


class Engine:
    """The actor."""

    def __init__(self, model: str) -> None:
        from vllm import LLM

        self._llm = LLM(
            model, enforce_eager=True, kv_cache_memory_bytes=256 << 20, block_size=32, skip_tokenizer_init=True, **VLLM
        )

    def take(self, arrays: dict[str, Any]) -> int:
        """Load them layer by layer, pack the tied head, and forget the prefixes of the old weights."""
        tensors = {name: torch.from_numpy(array).view(torch.bfloat16) for name, array in arrays.items()}
        config = self._llm.llm_engine.model_config

        def load(model: Any) -> int:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

            initialize_layerwise_reload(model)
            loaded = model.load_weights(iter(tensors.items()))
            finalize_layerwise_reload(model, config)
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
            return len(loaded)

        (loaded,) = self._llm.apply_model(load)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset")
        return int(loaded)


class RayPushes:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def push(self, weights: Tensors) -> float:
        """Seconds from weights in the trainer's memory to an engine that has loaded them."""
        started = time.perf_counter()
        reference = ray.put({name: tensor.view(torch.int16).numpy() for name, tensor in weights.items()})
        if not ray.get(self._actor.take.remote(reference), timeout=START_SECONDS):
            raise SystemExit("nothing was loaded")
        return time.perf_counter() - started


@contextmanager
def ray_pushes(model: Path) -> Iterator[RayPushes]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        actor: Any = ray.remote(Engine).options(runtime_env={"env_vars": ACTOR_ENVIRONMENT}).remote(str(model))
        yield RayPushes(actor)
    finally:
        ray.shutdown()

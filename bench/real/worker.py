"""Inside vLLM's worker: what an install is measured against, in the same process, with the same model and threads.

The bare load is vLLM's own layerwise reload and nothing else: no session, no check of bytes, no label, no caches; the
tensors lie in this process's memory already, touched. The tied head is packed anew, as any correct update must.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from engine_agent.vllm.worker import WorkerExtension


class MeasuredWorker(WorkerExtension):
    """Mixed into vLLM's worker class: `self` is that worker."""

    def bench_take(self: Any, path: str) -> int:
        """Read the weights that bare loads load, into ordinary memory; returns their number."""
        loaded = load_file(path)
        self.bench_tensors = {name: tensor.clone() for name, tensor in loaded.items()}
        self.bench_copies = {name: torch.empty_like(tensor) for name, tensor in self.bench_tensors.items()}
        for name, tensor in self.bench_tensors.items():
            self.bench_copies[name].copy_(tensor)
        return len(self.bench_tensors)

    def bench_bare_load(self: Any) -> dict[str, float]:
        """Seconds by part of one layerwise load, as vLLM comes."""
        model, marks = self.model_runner.model, [time.perf_counter()]
        initialize_layerwise_reload(model)
        marks.append(time.perf_counter())
        model.load_weights(iter(self.bench_tensors.items()))
        marks.append(time.perf_counter())
        finalize_layerwise_reload(model, self.model_config)
        marks.append(time.perf_counter())
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        marks.append(time.perf_counter())
        parts = dict(zip(("open", "load", "close", "head"), _differences(marks), strict=True))
        return parts | {"all": marks[-1] - marks[0]}

    def bench_reload(self: Any, directory: str) -> bool:
        """vLLM's own way over the disk: read the safetensors and load them, layer by layer."""
        self.model_runner.reload_weights(weights_path=directory)
        return True

    def bench_copy(self: Any) -> float:
        """Seconds to copy the same bytes once, tensor by tensor, from memory to memory."""
        started = time.perf_counter()
        for name, tensor in self.bench_tensors.items():
            self.bench_copies[name].copy_(tensor)
        return time.perf_counter() - started


def _differences(marks: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(marks)]

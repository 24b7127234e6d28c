"""Methods that Weightplane adds to vLLM's workers (`worker_extension_cls`), called by `collective_rpc`.

Every worker answers, so a caller can count the answers against the world size. Replies are plain dictionaries.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from engine_agent.vllm.ranks import rank_in_engine


class WorkerExtension:
    """Mixed into vLLM's worker class: `self` is that worker."""

    def weightplane_facts(self: Any) -> dict[str, Any]:
        """Who this worker is. `core_pid` is the EngineCore that started it, or itself if they are one process."""
        on_gpu = self.device.type == "cuda"
        return {
            "rank": rank_in_engine(self.vllm_config.parallel_config),
            "pid": os.getpid(),
            "core_pid": os.getppid() if self.vllm_config.parallel_config.distributed_executor_backend == "mp" else 0,
            "device_uuid": str(torch.cuda.get_device_properties(self.device).uuid) if on_gpu else "",
        }

    def weightplane_result(self: Any) -> dict[str, Any]:
        """What the last step of an update did here: `StepResult` and the rank."""
        result: dict[str, Any] = self.weight_transfer_engine.result_dict()
        return result

    def weightplane_open_exports(self: Any, exports: list[dict[str, Any]], engine_id: str) -> None:
        """Open the export of this worker's device, by its rank; with none close what is open. See
        `weightplane_exports`."""
        self.weight_transfer_engine.open_exports(exports, engine_id)

    def weightplane_exports(self: Any) -> dict[str, Any]:
        """What the last opening did here: rank, and cause, empty if it went well."""
        answer: dict[str, Any] = self.weight_transfer_engine.exports_dict()
        return answer

    def weightplane_scrub_kv(self: Any) -> int:
        """Zero the KV cache. A NaN in a page outlives the request that made it: 0 × NaN is NaN in later attention."""
        caches = [c for c in self.model_runner.kv_caches if isinstance(c, torch.Tensor)]
        for cache in caches:
            cache.zero_()
        return len(caches)

"""A vLLM worker on a CPU whose "device" memory is the twin: all else in it is as it is on a GPU."""

from __future__ import annotations

from typing import Any

from engine_agent.vllm.cuda_ipc import OpenedExports
from engine_agent.vllm.worker import WorkerExtension
from tests.support.twin_devices import TwinMemory

CLASS = f"{__name__}.TwinVllmWorker"


class TwinVllmWorker(WorkerExtension):
    """`self` is vLLM's worker."""

    def weightplane_facts(self: Any) -> dict[str, Any]:
        self.weight_transfer_engine._exports = OpenedExports(TwinMemory(), "e0")
        return WorkerExtension.weightplane_facts(self)

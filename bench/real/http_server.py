"""A stock vLLM API server that takes weights by its own HTTP endpoints, with the same transfer engine in its workers.

What vLLM offers a trainer without a control plane: pause, start, update, finish with a label, resume. The bytes lie in
a segment of shared memory, as they do for a push; the worker's check and install are the same code.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import torch
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from bench.real.fleet import ENVIRONMENT, START_SECONDS, ended
from bench.real.weights import Tensors
from controlplane.core.layout import Layout
from engine_agent.engine import Placement, SegmentSpan, StagedWeights
from engine_agent.lineage import agent_identity
from engine_agent.vllm.install import told_at_check, told_at_init
from trainer_agent.chunking import plan_segment
from trainer_agent.rank.exporter import layout_of
from trainer_agent.segments import SegmentPool
from trainer_agent.sources.iterable import IterableSource

DEVICE = "cpu-0"
CALL_SECONDS = 120.0
FLAGS = (
    *("--weight-transfer-config", '{"backend": "weightplane"}', "--dtype", "bfloat16", "--max-model-len", "512"),
    *("--max-num-seqs", "5", "--block-size", "32", "--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager"),
    *("--skip-tokenizer-init", "--worker-extension-cls", "engine_agent.vllm.worker.WorkerExtension"),
)


class HttpPushes:
    """vLLM's stock client, and what a trainer has to do around it."""

    def __init__(self, url: str, source: IterableSource) -> None:
        self._url = url
        self._client = HTTPVLLMWeightSyncClient(url, timeout=CALL_SECONDS)
        self._pool = SegmentPool("bench-http", 0)
        self._layout: Layout = layout_of(source)
        self._plan = plan_segment(self._layout)
        self._segment = self._pool.acquire(self._plan.byte_count)
        memory = torch.frombuffer(self._segment.memory, dtype=torch.uint8)
        self._targets = [
            memory[start : start + t.byte_count]
            for start, t in zip(self._plan.offsets, self._layout.tensors, strict=True)
        ]
        self._pushed = 0
        self._client.init_weight_transfer_engine(told_at_init(self._staged(), (DEVICE,)))

    def push(self, weights: Tensors) -> float:
        """Seconds from weights in the trainer's memory to an engine that runs again under the new label."""
        started = time.perf_counter()
        for target, tensor in zip(self._targets, weights.values(), strict=True):
            target.copy_(tensor.reshape(-1).view(torch.uint8))
        self._pushed += 1
        step = {"install_id": str(self._pushed)}
        self._post("pause", mode="keep", clear_cache="true")
        self._client.start_weight_update()
        self._client.update_weights(told_at_check(self._staged()) | step)
        self._client.update_weights(step | {"step": "install"})
        self._client.finish_weight_update(str(self._pushed))
        self._post("resume")
        return time.perf_counter() - started

    def check(self) -> None:
        """Raises SystemExit: the last push did not go well."""
        answer = requests.post(
            f"{self._url}/collective_rpc", json={"method": "weightplane_result"}, timeout=CALL_SECONDS
        )
        (result,) = answer.json()["results"]
        told = result if isinstance(result, str) else str(result)
        if "'ok': True" not in told and '"ok": true' not in told:
            raise SystemExit(f"the HTTP push failed: {told}")

    def close(self) -> None:
        self._targets.clear()
        self._pool.close()

    def _staged(self) -> StagedWeights:
        span = SegmentSpan(f"/dev/shm/{self._segment.name}", 0, self._plan.byte_count)
        placements = [Placement(0, offset) for offset in self._plan.offsets]
        return StagedWeights(self._layout, str(self._pushed), {"": [span]}, placements)

    def _post(self, path: str, **query: Any) -> None:
        requests.post(f"{self._url}/{path}", params=query, timeout=CALL_SECONDS).raise_for_status()


@contextmanager
def http_pushes(model: Path, source: IterableSource, log: Path) -> Iterator[HttpPushes]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *FLAGS], env=_environment(), stdout=sink, stderr=sink
        )
    with ended(process):
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the API server did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        pushes = HttpPushes(url, source)
        try:
            yield pushes
        finally:
            pushes.close()


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5.0).ok
    except requests.ConnectionError:
        return False


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": "weightplane",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **agent_identity(),
    }

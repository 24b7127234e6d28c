"""A vLLM API server of its own processes, as somebody else would start it for an external engine."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

import psutil

from engine_agent.lineage import agent_identity
from tests.support.eventually import eventually

START_SECONDS = 180
FLAGS = (
    "--enable-scale-out",
    *("--logprobs-mode", "processed_logprobs"),
    *("--scheduling-policy", "priority"),
    *("--weight-transfer-config", '{"backend": "weightplane"}'),
    *("--worker-extension-cls", "engine_agent.vllm.worker.WorkerExtension"),
)
"""What docs/operations.md says that such a server is started with."""
SMALL = (
    *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16", "--block-size", "32"),
    *("--kv-cache-memory-bytes", str(32 << 20), "--enforce-eager", "--skip-tokenizer-init"),
)


class VllmServer:
    """One server; `start` again after `kill` is another one at the same address."""

    def __init__(self, model: Path, port: int, log: Path, environment: Mapping[str, str | None] | None = None) -> None:
        """`environment`: over what such a server needs; None takes a variable away."""
        self.url = f"http://127.0.0.1:{port}"
        self._model = model
        self._port = port
        self._log = log
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Returns when it serves; its end is tied to this process's."""
        assert entry_points(group="vllm.endpoint_plugins", name="weightplane"), (
            "install this package anew: pip install -e ."
        )
        self._launch()
        try:
            await eventually(self._serves, within=START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def _launch(self) -> None:
        environment = {
            # an engine that ran in this process left variables of its own
            **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_PLUGINS": "weightplane",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **agent_identity(),
            **self._environment,
        }
        given = {name: value for name, value in environment.items() if value is not None}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self._port), *FLAGS, *SMALL],
                env=given,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """Every process of it, at once."""
        process, self._process = self._process, None
        if process is None:
            return
        victims = []
        if process.poll() is None:
            root = psutil.Process(process.pid)
            victims = [*root.children(recursive=True), root]
        for victim in victims:
            victim.kill()
        process.wait()
        psutil.wait_procs(victims, timeout=10)

    def _serves(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended: {self._log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"{self.url}/version", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

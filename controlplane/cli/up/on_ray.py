"""One engine of a fleet file on a node of a Ray cluster.

This process is the engine's stand-in here: it places an actor where there is room, which runs `weightplane engine` as
its own child, and it ends with that engine's exit code. SIGTERM here is an orderly end there; a stand-in that is killed
takes the actor with it, and the actor the engine. The fleet file lies at the same path on every node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from controlplane.cli.ending import CommandFailed
from controlplane.exit_codes import ExitCode

STOP_SECONDS = 15.0
"""For an orderly end on the node; below what ends this stand-in."""


class Runner:
    """The actor: one engine process on its node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, file: str, engine_id: str) -> int:
        """Until the engine's agent ends: its exit code."""
        words = ["engine", "--fleet", file, "--id", engine_id, "--die-with-parent", str(os.getpid())]
        devices = [str(d) for d in _ray().get_gpu_ids()]
        if devices:  # Ray's choice goes over the file's: it knows which are free
            words += ["--set", f"vllm.visible_devices={devices}".replace("'", '"')]
        self._process = subprocess.Popen([sys.executable, "-m", "controlplane.cli.main", *words])
        return self._process.wait()

    def stop(self) -> None:
        """In order; returns when it has ended or the time is over."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(STOP_SECONDS)


def run_on_ray(file: Path, engine_id: str) -> int:
    """Until the engine ends. Raises CommandFailed: no Ray, or no cluster."""
    ray = _ray()
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=True, logging_level="warning")
    except (ConnectionError, RuntimeError) as error:
        raise CommandFailed(ExitCode.UNREACHABLE, f"no Ray cluster answers: {error}") from error
    devices = _devices(file, engine_id) if ray.cluster_resources().get("GPU") else 0
    runner = ray.remote(Runner).options(num_cpus=1, num_gpus=devices, max_restarts=0, max_concurrency=2).remote()
    running = runner.run.remote(str(file.resolve()), engine_id)

    def stop(*_: Any) -> None:
        ray.get(runner.stop.remote(), timeout=STOP_SECONDS)

    signal.signal(signal.SIGTERM, stop)
    try:
        return int(ray.get(running))
    except ray.exceptions.RayError as error:
        raise CommandFailed(ExitCode.ENGINE_FAILED, f"{engine_id}: its Ray actor is gone: {error}") from error
    finally:
        ray.shutdown()


def _devices(file: Path, engine_id: str) -> int:
    from controlplane.cli.up.settings import engine_of

    vllm = engine_of(file, engine_id, {}).vllm
    return max(vllm.tensor_parallel_size, 1) if vllm else 0


def _ray() -> Any:
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        raise CommandFailed(ExitCode.CONFIG, "ray is not installed here: pip install 'weightplane[ray]'") from error

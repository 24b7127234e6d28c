"""A coordinator and engine agents with real vLLM, each a process of its own, on this machine.

Promises that all of them are gone after the block. The rank that pushes is the measuring process; its trainer agent is
a process too, as under torchrun.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from controlplane.cli.ask import get_fleet
from controlplane.cli.ending import CommandFailed
from weightplane.v1 import engine_pb2

RUN = "bench"
START_SECONDS = 300.0
END_SECONDS = 60.0
VLLM = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 4}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}


def quiet() -> None:
    """Of the measuring process: warnings alone, and one thread, as every process here has."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)


@dataclass
class MeasuredEngine:
    """One engine agent's process, and a way into its workers."""

    engine_id: str
    process: subprocess.Popen[str]

    def ask(self, method: str, *args: Any) -> Any:
        """What the first worker answers; see `bench.real.worker`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"method": method, "args": args}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine_id} ended in {method}")
        return json.loads(line)


@dataclass
class RealFleet:
    address: str
    engines: list[MeasuredEngine]
    directory: Path

    def statuses(self) -> dict[str, engine_pb2.EngineStatus]:
        """Each engine's own last word."""
        fleet = asyncio.run(get_fleet(self.address, 10.0))
        return {e.status.engine.engine_id: e.status for e in fleet.engines if e.known}


@contextmanager
def real_fleet(
    model: Path, *, cores: Sequence[str | None] = (None,), transport: str = "shared_memory", **engine: Any
) -> Iterator[RealFleet]:
    """`cores`: one engine for each, whose processes stay on these cores (as taskset has them); None: on any."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightplane-bench-")))
        address_file = directory / "address"
        config = {"listen": "127.0.0.1:0", "address_file": str(address_file), "run_id": RUN, "transport": transport}
        stack.enter_context(_coordinator(directory, config | {"state_dir": str(directory)}))
        _wait(address_file.exists, 30.0, "the coordinator")
        address = address_file.read_text()
        engines = [
            stack.enter_context(_engine(f"engine-{i}", model, address, directory, core, engine))
            for i, core in enumerate(cores)
        ]
        fleet = RealFleet(address, engines, directory)
        _wait(lambda: _all_there(fleet), START_SECONDS, "an engine")
        yield fleet


@contextmanager
def _coordinator(directory: Path, config: Mapping[str, str]) -> Iterator[None]:
    file = directory / "coordinator.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in config.items()))
    command = [sys.executable, "-m", "controlplane.cli.main", "coordinator", "--config", str(file)]
    with (directory / "coordinator.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT})
    with ended(process):
        yield


@contextmanager
def _engine(
    engine_id: str, model: Path, address: str, directory: Path, core: str | None, more: Mapping[str, Any]
) -> Iterator[MeasuredEngine]:
    told = {"engine_id": engine_id, "model": str(model), "coordinator": address, "run_id": RUN}
    told |= {"state_dir": str(directory), **more, "vllm": VLLM | more.get("vllm", {})}
    command = [sys.executable, "-m", "bench.real.engine_process", json.dumps(told)]
    command = command if core is None else ["taskset", "-c", core, *command]
    with (directory / f"{engine_id}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
    with ended(process):
        yield MeasuredEngine(engine_id, process)


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.stdin is not None:
            process.stdin.close()  # who reads it would hold up the end
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        process.kill()
        process.wait()


def _all_there(fleet: RealFleet) -> bool:
    gone = [e.engine_id for e in fleet.engines if e.process.poll() is not None]
    if gone:
        log = (fleet.directory / f"{gone[0]}.log").read_text()
        raise SystemExit(f"{gone[0]} did not start:\n{log[-4000:]}")
    with suppress(CommandFailed):
        return len(fleet.statuses()) == len(fleet.engines)
    return False


def _wait(check: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not start within {seconds} s")
        time.sleep(0.2)

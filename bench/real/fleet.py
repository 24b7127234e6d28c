"""A coordinator and engine agents with real vLLM, each a process of its own, on this machine.

Promises that all of them are gone after the block. The rank that pushes is the measuring process; its trainer agent is
a process too, as under torchrun.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from bench.coordinator import engines as heard
from bench.coordinator import start_coordinator
from bench.processes import processes
from bench.real.asked import Asked
from weightplane.v1 import engine_pb2

RUN = "bench"
START_SECONDS = 300.0
VLLM = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 4}


def quiet() -> None:
    """Of the measuring process: warnings alone, and one thread, as every process here has."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """One engine agent's process, and a way into its workers."""

    process: Asked

    def ask(self, method: str, *args: Any) -> Any:
        """What the first worker answers; see `bench.real.worker`."""
        return json.loads(self.process.ask(json.dumps({"method": method, "args": args})))


@dataclass
class RealFleet:
    address: str
    engines: list[MeasuredEngine]

    def statuses(self) -> dict[str, engine_pb2.EngineStatus]:
        """Each engine's own last word."""
        return {e.status.engine.engine_id: e.status for e in heard(self.address)}

    def all_there(self) -> bool:
        """Raises SystemExit: one ended."""
        for engine in self.engines:
            engine.process.check()
        return len(self.statuses()) == len(self.engines)


@contextmanager
def real_fleet(
    model: Path, *, cores: Sequence[str | None] = (None,), transport: str = "shared_memory", **engine: Any
) -> Iterator[RealFleet]:
    """`cores`: one engine for each, whose processes stay on these cores (as taskset has them); None: on any."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightplane-bench-")))
        started = stack.enter_context(processes(directory))
        address = start_coordinator(started, RUN, transport=transport)
        told = {"coordinator": address, "run_id": RUN, "state_dir": str(directory), "model": str(model)}
        told |= engine | {"vllm": VLLM | engine.get("vllm", {})}
        fleet = RealFleet(address, [])
        for i, core in enumerate(cores):
            name = f"engine-{i}"
            words = ("bench.real.engine_process", json.dumps(told | {"engine_id": name}))
            asked = stack.enter_context(Asked(*words, core=core, log=directory / f"{name}.log"))
            fleet.engines.append(MeasuredEngine(asked))
        started.wait(fleet.all_there, "an engine's hello", START_SECONDS)
        yield fleet

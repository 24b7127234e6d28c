"""Processes of the routing row: a vllm-router before one engine, and a coordinator with one in-memory engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bench.coordinator import engines, start_coordinator
from bench.fast_engines import RUN
from bench.processes import processes, write_toml
from tests.support.vllm_router import vllm_router


def vllm_router_before(engine: str) -> AbstractContextManager[str]:
    """Its URL. Its policy is the one that looks least at a request."""
    return vllm_router("--worker-urls", engine, "--log-level", "error", policy="round_robin")


@contextmanager
def one_engine_fleet(directory: Path) -> Iterator[tuple[str, str]]:
    """Addresses of a coordinator and of an engine agent, which serves what its in-memory engine loaded."""
    with processes(directory) as started:
        address = start_coordinator(started, RUN)
        engine = {"engine_id": "e0", "coordinator": address, "run_id": RUN, "state_dir": str(directory)}
        config = write_toml(directory / "engine.toml", engine | {"backend": "memory", "initial": "serve"})
        started.start("e0", "-m", "controlplane.cli.main", "engine", "--config", str(config))
        started.wait(lambda: any(e.routable for e in engines(address)), "an engine that serves")
        yield address, engines(address)[0].endpoint

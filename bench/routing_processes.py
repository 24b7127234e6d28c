"""Processes of the routing row: a vllm-router before one engine, and a coordinator with one in-memory engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.fast_engines import RUN
from bench.wire_fleet import start_module, wait_until
from controlplane.cli.ask import get_fleet
from controlplane.cli.ending import CommandFailed
from tests.support.ports import free_port


@contextmanager
def vllm_router_before(engine: str) -> Iterator[str]:
    """Its URL; it may need a moment until it answers. Its policy is the one that looks least at a request."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    more = ["--prometheus-port", str(free_port()), "--policy", "round_robin", "--worker-urls", engine]
    quiet = ["--log-level", "error"]
    process = subprocess.Popen([*command, *more, *quiet], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def one_engine_fleet(directory: Path) -> Iterator[tuple[str, str]]:
    """Addresses of a coordinator and of an engine agent, which serves what its in-memory engine loaded."""
    address_file = directory / "address"
    lines = {"listen": "127.0.0.1:0", "address_file": address_file, "run_id": RUN, "state_dir": directory}
    config = directory / "coordinator.toml"
    config.write_text("".join(f'{name} = "{value}"\n' for name, value in lines.items()))
    command = ["controlplane.cli.main", "coordinator", "--config", str(config)]
    processes = [start_module(directory, "coordinator", command)]
    try:
        wait_until(address_file.exists)
        address = address_file.read_text()
        words = {"engine_id": "e0", "coordinator": address, "run_id": RUN, "state_dir": directory, "backend": "memory"}
        engine = directory / "engine.toml"
        engine.write_text("".join(f'{n} = "{v}"\n' for n, v in words.items()) + 'initial = "serve"\n')
        processes.append(start_module(directory, "e0", ["controlplane.cli.main", "engine", "--config", str(engine)]))
        wait_until(lambda: bool(_endpoint(address)))
        yield address, _endpoint(address)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(60)


def _endpoint(address: str) -> str:
    """Of the engine, once its gate is open; else empty."""
    with suppress(CommandFailed):
        for engine in asyncio.run(get_fleet(address, 10.0)).engines:
            if engine.routable:
                return str(engine.endpoint)
    return ""

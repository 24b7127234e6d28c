"""A daemon whose further port is taken ends with its code, and nobody was answered at its own port before that."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from controlplane.coordinator.daemon import CoordinatorSettings, run_coordinator
from controlplane.exit_codes import ExitCode
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from tests.support.ports import free_port


@contextmanager
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def answered_before_it_ended(port: int, running: Awaitable[int]) -> tuple[int, int]:
    """Its exit code, and how often the port took a connection until then and just after."""
    ended, count = threading.Event(), 0

    def knock() -> None:
        nonlocal count
        over = False
        while not over:
            over = ended.is_set()
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                count += 1

    knocking = asyncio.create_task(asyncio.to_thread(knock))
    code = await asyncio.wait_for(running, 60)
    ended.set()
    await knocking
    return code, count


@pytest.mark.parametrize("setting", ["metrics_listen", "web_listen"])
async def test_a_coordinator_whose_further_port_is_taken_serves_nobody(tmp_path: Path, setting: str) -> None:
    port = free_port()
    with taken() as other:
        further = {"metrics_listen": other} if setting == "metrics_listen" else {"web_listen": other}
        settings = CoordinatorSettings(f"127.0.0.1:{port}", tmp_path, **further)  # type: ignore[arg-type]
        assert await answered_before_it_ended(port, run_coordinator(settings)) == (ExitCode.PORT_IN_USE, 0)


async def test_a_coordinator_whose_own_port_is_taken_gives_its_further_ones_back(tmp_path: Path) -> None:
    page, metrics = free_port(), free_port()
    with taken() as own:
        settings = CoordinatorSettings(
            own, tmp_path, web_listen=f"127.0.0.1:{page}", metrics_listen=f"127.0.0.1:{metrics}"
        )
        assert await run_coordinator(settings) == ExitCode.PORT_IN_USE
    for port in (page, metrics):
        socket.create_server(("127.0.0.1", port)).close()


async def test_an_engine_agent_whose_metrics_port_is_taken_serves_nobody(tmp_path: Path) -> None:
    port = free_port()
    with taken() as other:
        settings = EngineSettings(
            "e0", listen=f"127.0.0.1:{port}", state_dir=tmp_path, backend="memory", metrics_listen=other
        )
        assert await answered_before_it_ended(port, run_engine(settings)) == (ExitCode.PORT_IN_USE, 0)

"""What systemd hears of each daemon, as a process of its own: ready, alive while its work moves, ending."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.local_fleet import RUN

WATCHDOG_SECONDS = 1.5
RANK = "import time; time.sleep(600)"


class Heard:
    """The notify socket's other end."""

    def __init__(self, directory: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self.path = directory / "notify"
        self._socket.bind(str(self.path))
        self._lines: list[str] = []

    def count(self, line: str) -> int:
        """How often a line that begins so was heard."""
        while True:
            try:
                self._lines += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return sum(heard.startswith(line) for heard in self._lines)

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def daemon(heard: Heard, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = os.environ | {
        "NOTIFY_SOCKET": str(heard.path),
        "WATCHDOG_USEC": str(int(WATCHDOG_SECONDS * 1e6)),
    }
    environment.pop("WATCHDOG_PID", None)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controlplane.cli.main", *words), env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def heard(tmp_path: Path) -> AsyncIterator[Heard]:
    heard = Heard(tmp_path)
    yield heard
    heard.close()


def _words(command: str, directory: Path, coordinator: str) -> list[str]:
    sets = [f"run_id={RUN}", f"state_dir={directory}"]
    address = ["--listen", "127.0.0.1:0"] if command != "trainer" else []
    if command == "coordinator":
        sets.append("lease_ttl_seconds=1.0")
    else:
        address += ["--coordinator", coordinator]
        sets += ["engine_id=e0", "backend=memory"] if command == "engine" else ["nproc_per_node=1"]
    words = [command, *address, *(w for s in sets for w in ("--set", s))]
    script = directory / "rank.py"
    script.write_text(RANK)
    return [*words, "--", str(script)] if command == "trainer" else words


@pytest.mark.parametrize("command", ["coordinator", "engine", "trainer"])
async def test_a_daemon_says_that_it_is_ready_alive_and_ending(heard: Heard, tmp_path: Path, command: str) -> None:
    nobody = "127.0.0.1:1"
    async with daemon(heard, *_words(command, tmp_path, nobody)) as process:
        await eventually(lambda: heard.count("READY=1") == 1)
        alive = heard.count("WATCHDOG=1")
        await eventually(lambda: heard.count("WATCHDOG=1") > alive + 2)
        assert heard.count("STATUS=") > 0
        assert heard.count("STOPPING=1") == 0
        process.terminate()
        await asyncio.wait_for(process.wait(), 60)
    assert heard.count("STOPPING=1") == 1

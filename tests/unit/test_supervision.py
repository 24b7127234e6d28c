"""systemd's notifications, at a socket of our own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.supervision import Supervisor, Turns
from tests.support.eventually import eventually


class Systemd:
    """The receiving end."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.heard: list[str] = []

    def lines(self) -> list[str]:
        """All that was ever heard."""
        while True:
            try:
                self.heard += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return self.heard

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    monkeypatch.setenv("NOTIFY_SOCKET", "notify")
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    systemd = Systemd(Path("notify"))
    yield systemd
    systemd.close()


def test_ready_is_said_once_and_the_status_each_time(systemd: Systemd) -> None:
    supervisor = Supervisor()
    supervisor.ready("serves")
    supervisor.ready("serves 3")
    supervisor.stopping()
    assert systemd.lines() == ["READY=1", "STATUS=serves", "STATUS=serves 3", "STOPPING=1", "STATUS=ends in order"]


async def test_the_watchdog_is_fed_while_the_work_moves_and_no_longer(systemd: Systemd) -> None:
    supervisor, moved = Supervisor(), [0]
    supervisor.ready("serves")
    looks = Turns()

    def look() -> int:
        looks()
        return moved[0]

    feeding = asyncio.create_task(supervisor.feed(look))
    await eventually(lambda: systemd.lines().count("WATCHDOG=1") == 1)
    before = looks()
    await eventually(lambda: looks() > before + 10)  # it was looked at often, and nothing moved
    assert systemd.lines().count("WATCHDOG=1") == 1
    moved[0] += 1
    await eventually(lambda: systemd.lines().count("WATCHDOG=1") == 2)
    feeding.cancel()


async def test_a_start_that_moves_gets_more_time(systemd: Systemd) -> None:
    feeding = asyncio.create_task(Supervisor().feed(Turns()))
    await eventually(lambda: "EXTEND_TIMEOUT_USEC=60000000" in systemd.lines())
    feeding.cancel()


async def test_without_systemd_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    supervisor = Supervisor()
    supervisor.ready("serves")
    await asyncio.wait_for(supervisor.feed(Turns()), 30)


def test_another_processs_watchdog_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Supervisor({"WATCHDOG_USEC": "5000000"}).watchdog_seconds == 5.0
    assert Supervisor({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"}).watchdog_seconds is None
    assert Supervisor({}).watchdog_seconds is None

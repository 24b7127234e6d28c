"""`weightplane health` against a server that recovers, that is gone, that refuses, and whose event loop hangs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.exit_codes import ExitCode
from controlplane.rpc.security import ServerSecurity
from controlplane.rpc.server import RunningServer, start_server
from tests.support.certificates import people
from tests.support.ports import free_port

ANSWER_SECONDS = "20"
HUNG_SECONDS = "2"
PLAIN = ServerSecurity()


class LoopThread:
    """A server, not ready, whose event loop is a thread of its own and can be held."""

    def __init__(self, security: ServerSecurity) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(start_server("127.0.0.1:0", [], security), self._loop)
        self._server: RunningServer = starting.result(30)
        self.address = self._server.address

    @contextmanager
    def hung(self) -> Iterator[None]:
        go_on = threading.Event()
        self._loop.call_soon_threadsafe(go_on.wait)
        try:
            yield
        finally:
            go_on.set()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@contextmanager
def server(security: ServerSecurity = PLAIN) -> Iterator[LoopThread]:
    running = LoopThread(security)
    try:
        yield running
    finally:
        running.close()


def health(address: str, *words: str, seconds: str = ANSWER_SECONDS) -> tuple[int, str]:
    own = [sys.executable, "-m", "controlplane.cli.main", "health", "--addr", address, "--timeout", seconds]
    shown = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTPLANE_")}
    done = subprocess.run([*own, *words], env=shown, capture_output=True, text=True, timeout=90, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_daemon_that_is_not_ready_is_alive() -> None:
    with server() as running:
        assert health(running.address) == (ExitCode.FAILED, "NOT_SERVING\n")
        assert health(running.address, "--alive") == (ExitCode.OK, "NOT_SERVING\n")


def test_a_daemon_whose_event_loop_hangs_is_not_alive_though_its_port_is_open() -> None:
    with server() as running, running.hung():
        host, _, port = running.address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()
        code, said = health(running.address, "--alive", seconds=HUNG_SECONDS)
        assert code == ExitCode.UNREACHABLE, said


def test_a_daemon_that_is_gone_is_not_alive() -> None:
    code, said = health(f"127.0.0.1:{free_port()}", "--alive")
    assert code == ExitCode.UNREACHABLE, said


def test_a_daemon_that_refuses_the_prober_is_alive(tmp_path: Path) -> None:
    """Its certificate, or the prober's, has lapsed: it serves those that are connected, and a restart mends nothing."""
    with server(ServerSecurity(people(tmp_path)("coordinator"))) as running:
        code, said = health(running.address)
        assert code == ExitCode.UNREACHABLE, said
        code, said = health(running.address, "--alive")
        assert (code, said.partition(":")[0]) == (ExitCode.OK, "TLS_FAILED")

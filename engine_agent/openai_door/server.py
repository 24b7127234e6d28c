"""The door's HTTP server, inside the agent's process and on its loop. The port is bound before anyone is told of it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from controlplane.rpc.ports import PortUnavailable
from engine_agent.openai_door.answers import App
from engine_agent.openai_door.door import PEER

STOP_SECONDS = 2
"""For answers under way, when the agent stops."""
BACKLOG = 256
MAX_CONNECTIONS = 4096
"""Open at once, whether they ask or not; one more is told 503."""


class _Server(uvicorn.Server):
    """Signals are the agent's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Http(AutoHTTPProtocol):  # type: ignore[valid-type,misc]
    """A request's state has its caller's certificate: ASGI itself does not tell."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.app_state: dict[str, Any] = {**self.app_state, PEER: transport.get_extra_info("peercert")}


class DoorServer:
    """Serves an app until it is stopped."""

    def __init__(self, app: App, listen: str, context: ssl.SSLContext | None = None) -> None:
        """`context`: it speaks TLS. Raises PortUnavailable."""
        self._socket = _bound(listen)
        host = listen.rpartition(":")[0]
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        settings: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False, "ws": "none"}
        settings |= {"timeout_graceful_shutdown": STOP_SECONDS, "limit_concurrency": MAX_CONNECTIONS}
        config = uvicorn.Config(app, http=_Http, **settings)
        config.load()
        config.ssl = context
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="weightplane-openai-door")

    async def stop(self) -> None:
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()


def _bound(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, int(port)))
            made.listen(BACKLOG)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise PortUnavailable(f"cannot listen on {listen}: {error.strerror}") from error
    return made

"""The routes of a model where requests find them, and the wait for a change.

Who fills it is another's affair: the client follows the coordinator over gRPC, the coordinator its own record.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc

from controlplane.core import errors as e
from controlplane.rollout.connections import Connections
from controlplane.rollout.routing import Route, Routes, RoutingTable


class RouteBoard:
    """A routing table, and whoever waits for it to change. One event loop uses it."""

    def __init__(self, connections: Connections) -> None:
        self.table = RoutingTable()
        self.refused: e.WeightplaneError | None = None
        """An answer that would be the same again: no routes come any more."""
        self.lost = ""
        """Why the coordinator is not heard; empty while it is."""
        self._connections = connections
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    def take(self, routes: Routes) -> None:
        """These are the routes now; channels to other engines close once nobody uses them."""
        self.lost = ""
        self.table.replace(routes)
        self._connections.keep([r.endpoint for r in routes.routes])
        self.wake()

    def refuse(self, error: e.WeightplaneError) -> None:
        """Every request that waits, or comes, is told this."""
        self.refused = error
        self.wake()

    @contextlib.contextmanager
    def asking(self, route: Route) -> Iterator[grpc.aio.Channel]:
        """The channel to an engine, with one request more counted on it."""
        try:
            with self.table.asking(route), self._connections.use(route.endpoint) as channel:
                yield channel
        finally:
            self._ended()

    async def change(self, timeout: float) -> bool:
        """Whether the routes changed within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self._changed.wait()
        except TimeoutError:
            return False

    async def room(self, timeout: float) -> None:
        """Wait until a request of this process ended, or the routes changed; at most `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._room.wait()

    def _ended(self) -> None:
        """A request did: there is room for another."""
        self._room.set()
        self._room = asyncio.Event()

    def wake(self) -> None:
        """Have all who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._ended()

"""Channels to engines: one for each endpoint, made on first use, closed once no route named it for a while and nobody
uses it.

A long run sees many lives of its engines, each on a port of its own; without this its channels would only grow. But an
engine has no route while it installs, and a crowd of requests comes when it has one again: they find their channel.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import grpc

from controlplane.rpc.channels import open_channel
from controlplane.rpc.security import PLAIN, TlsSettings
from weightplane.v1 import rollout_pb2_grpc

LINGER_SECONDS = 60.0
"""Longer than an update takes, mostly."""


class Connections:
    """Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        tls: TlsSettings = PLAIN,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        """`options`: of its channels, beside the common ones."""
        self._linger_seconds = LINGER_SECONDS
        self._last_wanted: dict[str, float] = {}
        """By endpoint: when it had a route or a user last; of those that have neither."""
        self._tls = tls
        self._options = options
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, rollout_pb2_grpc.RolloutAsyncStub] = {}
        self._users: Counter[str] = Counter()
        self._wanted: frozenset[str] = frozenset()
        self._closing: set[asyncio.Task[None]] = set()

    @contextmanager
    def use(self, endpoint: str) -> Iterator[grpc.aio.Channel]:
        """The channel to `endpoint`, kept open while the block runs."""
        if endpoint not in self._channels:
            self._channels[endpoint] = open_channel(endpoint, self._tls, self._options)
        self._users[endpoint] += 1
        try:
            yield self._channels[endpoint]
        finally:
            self._users[endpoint] -= 1
            self._close_unwanted()

    def rollout(self, endpoint: str) -> rollout_pb2_grpc.RolloutAsyncStub:
        """The stub of a channel that is in use. Making one takes as long as choosing a route."""
        if endpoint not in self._stubs:
            self._stubs[endpoint] = rollout_pb2_grpc.RolloutStub(self._channels[endpoint])
        return self._stubs[endpoint]

    def keep(self, endpoints: Collection[str]) -> None:
        """From now on only these endpoints' channels stay open while unused for long."""
        self._wanted = frozenset(endpoints)
        self._close_unwanted()

    async def close(self) -> None:
        self._wanted, self._linger_seconds = frozenset(), 0.0
        self._users.clear()
        self._close_unwanted()
        await asyncio.gather(*self._closing)

    def _close_unwanted(self) -> None:
        used = {endpoint for endpoint, count in self._users.items() if count > 0}
        unwanted = self._channels.keys() - self._wanted - used
        loop = asyncio.get_running_loop()
        self._last_wanted = {endpoint: self._last_wanted.get(endpoint, loop.time()) for endpoint in unwanted}
        for endpoint in unwanted:
            if loop.time() < self._last_wanted[endpoint] + self._linger_seconds:
                continue
            del self._users[endpoint], self._last_wanted[endpoint]
            self._stubs.pop(endpoint, None)
            task = asyncio.create_task(self._channels.pop(endpoint).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

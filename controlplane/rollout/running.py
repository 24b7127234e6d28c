"""The requests that engines have now, and their ends at their caller's word."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import grpc

from controlplane.core.versions import ModelName, RunId
from controlplane.rollout.asking import Ask
from controlplane.rollout.connections import Connections
from controlplane.rollout.routing import Route
from controlplane.rpc.errors import from_rpc_error
from weightplane.v1 import rollout_pb2, rollout_pb2_grpc

ABORT_SECONDS = 10.0
"""For an engine to end requests."""


class Running:
    """Where each request of a client is. Not thread-safe: one event loop owns it."""

    def __init__(self, connections: Connections, model: ModelName) -> None:
        self._connections = connections
        self._model = model
        self._asks: dict[str, tuple[Ask, Route, RunId]] = {}

    @contextmanager
    def at(self, route: Route, run_id: RunId, ask: Ask) -> Iterator[None]:
        """The request is at that engine while the block runs."""
        name = ask.assembly.request_id
        self._asks[name] = (ask, route, run_id)
        try:
            yield
        finally:
            self._asks.pop(name, None)

    async def abort(self, request_ids: Collection[str] | None) -> list[str]:
        """See `RolloutClient.abort`."""
        names = [name for name in self._asks if request_ids is None or name in request_ids]
        places: dict[tuple[Route, RunId], list[str]] = {}
        for name in names:
            ask, route, run_id = self._asks[name]
            ask.aborted = True
            places.setdefault((route, run_id), []).append(name)
        ended = await asyncio.gather(*(self._abort_at(*place, names) for place, names in places.items()))
        return [name for names in ended for name in names]

    async def _abort_at(self, route: Route, run_id: RunId, names: Sequence[str]) -> list[str]:
        request = rollout_pb2.AbortRequest(run_id=run_id, model=self._model, request_ids=names)
        try:
            with self._connections.use(route.endpoint) as channel:
                answer = await rollout_pb2_grpc.RolloutStub(channel).Abort(request, timeout=ABORT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return list(answer.request_ids)

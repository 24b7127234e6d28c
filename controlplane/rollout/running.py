"""A client's requests, wherever they are, and their ends at their caller's word."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import grpc
import structlog

from controlplane.core.versions import ModelName, RunId
from controlplane.rollout.asking import Ask
from controlplane.rollout.connections import Connections
from controlplane.rollout.routing import Route
from controlplane.rpc.errors import from_rpc_error
from weightplane.v1 import rollout_pb2, rollout_pb2_grpc

log = structlog.get_logger(__name__)

ABORT_SECONDS = 10.0
"""For an engine to end requests."""


class Running:
    """Not thread-safe: one event loop owns it."""

    def __init__(self, connections: Connections, model: ModelName, wake: Callable[[], None]) -> None:
        """`wake` has those look again who wait for an engine."""
        self._connections = connections
        self._model = model
        self._wake = wake
        self._asks: list[Ask] = []
        self._places: dict[str, tuple[Route, RunId]] = {}
        """By name: the engine that has it."""

    @contextmanager
    def request(self, ask: Ask) -> Iterator[None]:
        """It can be aborted while the block runs."""
        self._asks.append(ask)
        try:
            yield
        finally:
            self._asks.remove(ask)

    @contextmanager
    def at(self, route: Route, run_id: RunId, ask: Ask) -> Iterator[None]:
        """It is at that engine while the block runs."""
        name = ask.assembly.request_id
        self._places[name] = (route, run_id)
        try:
            yield
        finally:
            self._places.pop(name, None)

    async def abort(self, request_ids: Collection[str] | None) -> None:
        """See `RolloutClient.abort`."""
        places: dict[tuple[Route, RunId], list[str]] = {}
        for ask in self._asks:
            name = ask.assembly.request_id
            if request_ids is not None and name not in request_ids:
                continue
            ask.aborted = True
            if name in self._places:
                places.setdefault(self._places[name], []).append(name)
        self._wake()
        await asyncio.gather(*(self._abort_at(*place, names) for place, names in places.items()))

    async def _abort_at(self, route: Route, run_id: RunId, names: Sequence[str]) -> None:
        request = rollout_pb2.AbortRequest(run_id=run_id, model=self._model, request_ids=names)
        try:
            with self._connections.use(route.endpoint) as channel:
                await rollout_pb2_grpc.RolloutStub(channel).Abort(request, timeout=ABORT_SECONDS)
        except grpc.aio.AioRpcError as error:
            # It is going away, and its requests' streams end with it.
            log.info("abort_unheard", engine=route.engine_id, text=str(from_rpc_error(error)))

"""The coordinator's routes, followed for ever.

A coordinator that goes away does not stop rollouts: its last routes stay in force, marked stale (INV-10).
"""

from __future__ import annotations

import asyncio

import grpc
import structlog

from controlplane.core import errors as e
from controlplane.core.versions import ModelName, RunId
from controlplane.rollout.board import RouteBoard
from controlplane.rollout.connections import Connections
from controlplane.rollout.wire import routes_from_proto
from controlplane.rpc.channels import open_channel
from controlplane.rpc.errors import from_rpc_error
from controlplane.rpc.security import PLAIN, TlsSettings
from controlplane.rpc.security.diagnosis import explained
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

log = structlog.get_logger(__name__)

BACKOFF_SECONDS = 0.1
BACKOFF_MAX_SECONDS = 2.0
FINAL = (e.WrongRun, e.FrameInvalid, e.Unauthenticated, e.PermissionDenied)
"""What asking again does not mend."""


class RouteWatch(RouteBoard):
    """Keeps a routing table true, as far as the coordinator can be heard. One event loop uses it."""

    def __init__(
        self,
        coordinator: str,
        model: ModelName,
        run_id: RunId | None,
        connections: Connections,
        *,
        include_kept: bool = False,
        tls: TlsSettings = PLAIN,
    ) -> None:
        """`include_kept`: also engines that stay at a version of their own."""
        super().__init__(connections)
        self._tls = tls
        self._coordinator = coordinator
        self._model = model
        self._run_id = run_id
        self._include_kept = include_kept

    async def run(self) -> None:
        """For ever, over the coordinator's restarts; ends with `refused`."""
        pause = BACKOFF_SECONDS
        async with open_channel(self._coordinator, self._tls) as channel:
            stub = fleet_pb2_grpc.FleetStub(channel)
            while self.refused is None:
                request = fleet_pb2.WatchRoutesRequest(
                    model=self._model, run_id=self._run_id or "", include_kept=self._include_kept
                )
                try:
                    async for response in stub.WatchRoutes(request):
                        pause = BACKOFF_SECONDS
                        self.take(routes_from_proto(response))
                except grpc.aio.AioRpcError as error:
                    self.table.mark_stale()
                    self._lost(await explained(from_rpc_error(error), self._coordinator, self._tls))
                except e.TlsFailed as error:
                    self._lost(error)
                self.table.mark_stale()
                await asyncio.sleep(pause)
                pause = min(pause * 2, BACKOFF_MAX_SECONDS)

    def _lost(self, error: e.WeightplaneError) -> None:
        self.lost = str(error)
        if isinstance(error, FINAL):
            self.refuse(error)
        log.info("routes_lost", coordinator=self._coordinator, reason=error.reason, text=str(error))

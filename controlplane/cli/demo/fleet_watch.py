"""The fleet as the coordinator tells it, kept up to date beside the demo."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc

from controlplane.rpc.channels import open_channel
from weightplane.v1 import operator_pb2, operator_pb2_grpc

RETRY_SECONDS = 0.5
CATCH_UP_SECONDS = 1.0
"""The training run's events and the fleet's news come on different ways."""

Show = Callable[[operator_pb2.FleetView], None]


class FleetWatch:
    """`view` is the latest; `show` is called with each."""

    def __init__(self, address: str, show: Show) -> None:
        self._address = address
        self._show = show
        self._changed = asyncio.Event()
        self.view = operator_pb2.FleetView()

    async def run(self) -> None:
        """Until cancelled; a coordinator that is away for a while is asked again."""
        async with open_channel(self._address) as channel:
            stub = operator_pb2_grpc.OperatorStub(channel)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for answer in stub.WatchFleet(operator_pb2.WatchFleetRequest()):
                        self._take(answer.fleet)
                await asyncio.sleep(RETRY_SECONDS)

    async def until(self, holds: Callable[[operator_pb2.FleetView], bool]) -> operator_pb2.FleetView:
        """The first view for which `holds`. The caller bounds the wait."""
        while not holds(self.view):
            await self._changed.wait()
        return self.view

    async def reaches(self, number: int) -> None:
        """Returns when every known engine holds version `number` or a later one, or after a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_SECONDS):
                await self.until(lambda view: _holds(view, number))

    def _take(self, view: operator_pb2.FleetView) -> None:
        self.view = view
        self._show(view)
        self._changed.set()
        self._changed = asyncio.Event()


def _holds(view: operator_pb2.FleetView, number: int) -> bool:
    return all(e.status.HasField("applied") and e.status.applied.number >= number for e in view.engines if e.known)

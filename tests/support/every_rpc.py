"""Every RPC of every service as its descriptor says it is, called with nothing; and which services a server has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from controlplane.core.errors import WeightplaneError
from controlplane.rpc.errors import from_rpc_error
from weightplane.local.v1 import member_pb2
from weightplane.v1 import fleet_pb2, lifecycle_pb2, operator_pb2, rollout_pb2, weight_update_pb2

FILES = (
    *(fleet_pb2, lifecycle_pb2, operator_pb2, rollout_pb2, weight_update_pb2, member_pb2),
    *(health_pb2, reflection_pb2, channelz_pb2),
)
ASK_SECONDS = 60.0
TRIES = 10


@dataclass(frozen=True)
class Rpc:
    """One of them."""

    descriptor: MethodDescriptor

    @property
    def service(self) -> str:
        return str(self.descriptor.containing_service.full_name)

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.descriptor.name}"

    def __str__(self) -> str:
        return self.path

    async def call(
        self, channel: grpc.aio.Channel, frames: list[bytes], timeout: float, metadata: Any = None
    ) -> WeightplaneError | None:
        """What it ended with; None: it ended well. Frames are sent as they are."""
        for _ in range(TRIES):
            try:
                return await self._call(channel, frames, timeout, metadata)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # else grpcio cancelled it: the server's end met our last write
        raise AssertionError(f"{self}: grpcio cancelled it {TRIES} times")

    async def _call(
        self, channel: grpc.aio.Channel, frames: list[bytes], timeout: float, metadata: Any
    ) -> WeightplaneError | None:
        sent, received = self.descriptor.client_streaming, self.descriptor.server_streaming
        kind = f"{'stream' if sent else 'unary'}_{'stream' if received else 'unary'}"
        call: Any = getattr(channel, kind)(self.path, request_serializer=None, response_deserializer=None)
        request: Any = iter(frames) if sent else (frames[0] if frames else b"")
        try:
            going = call(request, timeout=timeout, metadata=metadata)
            if received:
                async for _ in going:
                    pass
            else:
                await going
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        return None


def every_rpc(services: set[str] | None = None) -> Iterator[Rpc]:
    """Of these services, else of all. Raises KeyError: a service that no file of `FILES` has."""
    known = {s.full_name: s for file in FILES for s in file.DESCRIPTOR.services_by_name.values()}
    for name in known if services is None else sorted(services):
        yield from map(Rpc, known[name].methods)


async def served(channel: grpc.aio.Channel) -> set[str]:
    """Every service that a running server has, by its own word."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    async for answer in stub.ServerReflectionInfo(iter(asked), timeout=ASK_SECONDS):
        return {service.name for service in answer.list_services_response.service}
    raise AssertionError("it answers")

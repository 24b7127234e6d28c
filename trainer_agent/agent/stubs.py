"""Channels of the trainer agent: one to the coordinator, one to each engine of the latest plan."""

from __future__ import annotations

from collections.abc import Callable, Collection

import grpc

from controlplane.rpc.bulk import encoded
from weightplane.v1 import fleet_pb2_grpc, lifecycle_pb2_grpc, operator_pb2_grpc, weight_update_pb2


class WeightUpdates:
    """As the generated stub, for frames that may be serialized already."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        service = weight_update_pb2.DESCRIPTOR.services_by_name["WeightUpdate"]
        self.UpdateWeights = channel.stream_stream(
            f"/{service.full_name}/{service.methods_by_name['UpdateWeights'].name}",
            request_serializer=encoded,
            response_deserializer=weight_update_pb2.UpdateWeightsResponse.FromString,
        )


class Stubs:
    """Made on first use, closed when no plan names them any more, or at the end."""

    def __init__(self, coordinator: str, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._open = open_channel
        self._coordinator = open_channel(coordinator)
        self._engines: dict[str, grpc.aio.Channel] = {}
        self.fleet: fleet_pb2_grpc.FleetAsyncStub = fleet_pb2_grpc.FleetStub(self._coordinator)
        self.operator: operator_pb2_grpc.OperatorAsyncStub = operator_pb2_grpc.OperatorStub(self._coordinator)

    def engine(self, endpoint: str) -> WeightUpdates:
        """The stub of an engine agent."""
        return WeightUpdates(self._channel(endpoint))

    def lifecycle(self, endpoint: str) -> lifecycle_pb2_grpc.LifecycleAsyncStub:
        """The same agent's other service."""
        stub: lifecycle_pb2_grpc.LifecycleAsyncStub = lifecycle_pb2_grpc.LifecycleStub(self._channel(endpoint))
        return stub

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._engines:
            self._engines[endpoint] = self._open(endpoint)
        return self._engines[endpoint]

    async def keep(self, endpoints: Collection[str]) -> None:
        """Close every engine's channel but these."""
        for gone in self._engines.keys() - set(endpoints):
            await self._engines.pop(gone).close()

    async def close(self) -> None:
        """Close everything."""
        await self.keep(())
        await self._coordinator.close()

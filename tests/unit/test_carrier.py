"""The coordinator's carries: however one ends, its end is told, since nobody brings that engine anything before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.coordinator.carrier import Carrier
from controlplane.core.errors import NotWelcomed, UnknownUpdate
from controlplane.core.fleet_effects import Carry
from controlplane.core.fleet_events import CarryEnded
from controlplane.core.fleet_records import CheckpointKept
from controlplane.core.plan import EnginePlace
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, ModelName, Term, UpdateId, WeightVersion
from controlplane.rpc.server import start_server
from weightplane.v1 import version_pb2, weight_update_pb2, weight_update_pb2_grpc

VERSION = WeightVersion(3, Term(1))
LIMIT_SECONDS = 60.0
Response = weight_update_pb2.UpdateWeightsResponse


class _ReadyEngine(weight_update_pb2_grpc.WeightUpdateServicer):
    """Says that it read everything, and waits for the next frame."""

    async def UpdateWeights(self, request_iterator: Any, context: Any) -> AsyncIterator[Response]:
        version = version_pb2.WeightVersion(term=1, number=3)
        await anext(request_iterator)
        yield Response(accepted=weight_update_pb2.UpdateAccepted(version=version))
        yield Response(ready=weight_update_pb2.UpdateReady(version=version))
        async for _ in request_iterator:
            pass


class _Hub:
    """The carrier's side of the hub; watching an update breaks with `fault`."""

    core = SimpleNamespace(settings=SimpleNamespace(run_id="run"), term=Term(1))

    def __init__(self, fault: Exception) -> None:
        self.told: asyncio.Queue[CarryEnded] = asyncio.Queue()
        self._fault = fault

    async def handle(self, event: CarryEnded) -> None:
        await self.told.put(event)

    async def watch_update(self, run_id: str, update_id: str) -> AsyncIterator[Any]:
        raise self._fault
        yield


@pytest.mark.parametrize("fault", [UnknownUpdate(update_id="u"), RuntimeError("unplanned")], ids=["known", "unplanned"])
async def test_a_carry_whose_wait_for_go_breaks_is_told_as_ended(fault: Exception) -> None:
    hub = _Hub(fault)
    async with _serving(_ReadyEngine()) as endpoint:
        carrier = Carrier(hub, LIMIT_SECONDS)  # type: ignore[arg-type]
        carrier.start(_carry(endpoint))
        ended = await asyncio.wait_for(hub.told.get(), LIMIT_SECONDS / 2)
        await carrier.close()
    assert (ended.update_id, ended.engine_id) == ("u", "e0")
    assert ended.error is not None
    assert str(fault) in str(ended.error)


async def test_a_carry_that_breaks_before_its_first_frame_is_told_as_ended() -> None:
    hub = _Hub(RuntimeError())
    carrier = Carrier(hub, LIMIT_SECONDS)  # type: ignore[arg-type]
    carrier.start(_carry("not an endpoint"))
    ended = await asyncio.wait_for(hub.told.get(), LIMIT_SECONDS / 2)
    await carrier.close()
    assert ended.error is not None


class _LateEngine(weight_update_pb2_grpc.WeightUpdateServicer):
    """Reads its welcome when it was asked twice already; then takes what comes."""

    def __init__(self) -> None:
        self.asked = 0

    async def UpdateWeights(self, request_iterator: Any, context: Any) -> AsyncIterator[Response]:
        self.asked += 1
        if self.asked <= 2:
            raise NotWelcomed(engine_id="e0")
        yield Response(applied=weight_update_pb2.UpdateApplied(version=version_pb2.WeightVersion(term=1, number=3)))


async def test_an_engine_that_has_not_read_its_welcome_yet_is_asked_again_at_once() -> None:
    hub, engine = _Hub(RuntimeError()), _LateEngine()
    async with _serving(engine) as endpoint:
        carrier = Carrier(hub, LIMIT_SECONDS)  # type: ignore[arg-type]
        carrier.start(_carry(endpoint))
        ended = await asyncio.wait_for(hub.told.get(), LIMIT_SECONDS / 2)
        await carrier.close()
    assert (ended.error, engine.asked) == (None, 3)


@asynccontextmanager
async def _serving(servicer: weight_update_pb2_grpc.WeightUpdateServicer) -> AsyncIterator[str]:
    def register(server: Any) -> str:
        weight_update_pb2_grpc.add_WeightUpdateServicer_to_server(servicer, server)
        return "weightplane.v1.WeightUpdate"

    server = await start_server("127.0.0.1:0", [register])
    try:
        yield server.address
    finally:
        await server.stop()


def _carry(endpoint: str) -> Carry:
    place = EnginePlace(EngineId("e0"), Incarnation("i0"), endpoint, "host", (DeviceUuid("CPU-0"),))
    kept = CheckpointKept(ModelName("policy"), VERSION, "v3", b"l" * 32, b"c" * 32, 1, 1, 4)
    return Carry(UpdateId("u"), place, VERSION, kept, waits_for_go=True)

"""An engine's session without an engine: it says what the test wants said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.local_fleet import RUN, LocalFleet
from weightplane.v1 import engine_pb2, fleet_pb2, version_pb2


@asynccontextmanager
async def engine_that_says(fleet: LocalFleet, **hello: Any) -> AsyncIterator[None]:
    """An engine's session, until the block ends."""
    status = {
        "engine": version_pb2.EngineRef(engine_id="by-hand", incarnation="by-hand-1"),
        "run_id": RUN,
        "model": "policy",
        "life": engine_pb2.ENGINE_LIFE_RUNNING,
        "weights": engine_pb2.WEIGHTS_STATE_UNSET,
        "residency": engine_pb2.RESIDENCY_AWAKE,
    }
    said = fleet_pb2.EngineHello(
        status=engine_pb2.EngineStatus(**status | hello.pop("status", {})),
        endpoint="127.0.0.1:1",
        host_id="by-hand",
        device_uuids=["CPU-by-hand"],
        **hello,
    )
    session = fleet.fleet.Session()
    await session.write(fleet_pb2.SessionRequest(engine_hello=said))
    while not (await session.read()).HasField("welcome"):
        pass
    try:
        yield
    finally:
        session.cancel()

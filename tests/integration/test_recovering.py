"""A coordinator that recovers, as others see it over real gRPC: not ready, and it answers who only looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cases.cargo import refusals
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.local_fleet import RUN, LocalFleet, local_fleet
from weightplane.v1 import fleet_pb2

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LONGER_THAN_THIS_TEST = 600.0
"""So long an engine that does not come is waited for."""
ALL = ("", "weightplane.v1.Fleet", "weightplane.v1.Rollout", "weightplane.v1.Operator")


async def health(fleet: LocalFleet) -> dict[str, int]:
    stub: Any = health_pb2_grpc.HealthStub(fleet.channel(fleet.address))
    found = {}
    for service in ALL:
        request = health_pb2.HealthCheckRequest(service=service)
        response = await stub.Check(request, timeout=PATIENCE_SECONDS, wait_for_ready=True)
        found[service] = int(response.status)
    return found


@pytest.mark.timeout(200)
async def test_a_recovering_coordinator_is_not_ready_answers_who_looks_and_begins_nothing(tmp_path: Path) -> None:
    async with local_fleet(tmp_path, engines=1) as fleet:
        assert await health(fleet) == dict.fromkeys(ALL, SERVING)
        await fleet.stop("coordinator")
        await fleet.stop("e0")
        await fleet.start_coordinator(lease_ttl_seconds=LONGER_THAN_THIS_TEST)
        assert await health(fleet) == dict.fromkeys(ALL, NOT_SERVING) | {"weightplane.v1.Operator": SERVING}
        view = await fleet.view()
        assert (view.recovering, view.coordinator_term, list(view.engines)) == (True, 2, [])
        with refusals("COORDINATOR_RECOVERING"):
            await fleet.begin()
        with refusals("COORDINATOR_RECOVERING"):
            await asked_for_a_lease(fleet)
        fleet.start_engine("e0")
        await eventually(lambda: _serves(fleet))
        assert not (await fleet.view()).recovering


async def asked_for_a_lease(fleet: LocalFleet) -> None:
    """By another trainer, which would take it over. Raises AioRpcError."""
    hello = fleet_pb2.TrainerHello(
        run_id=RUN,
        model="policy",
        trainer_id="other",
        incarnation="its own",
        ranks=[fleet_pb2.TrainerRankInfo(rank=0, host_id="elsewhere", device_uuid="CPU-other")],
        takeover=True,
    )
    call = fleet.fleet.Session(iter([fleet_pb2.SessionRequest(trainer_hello=hello)]), timeout=PATIENCE_SECONDS)
    async for _ in call:
        raise AssertionError("it was welcomed")


async def _serves(fleet: LocalFleet) -> bool:
    return await health(fleet) == dict.fromkeys(ALL, SERVING)

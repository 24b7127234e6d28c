"""INV-10, the other way round: after a decision an engine is routed to at once, and not at its next heartbeat."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.writer import Weights

HEARTBEAT_SECONDS = 60.0


async def test_an_engine_is_routable_again_long_before_its_next_heartbeat(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path)
    try:
        await fleet.start_coordinator(heartbeat_seconds=HEARTBEAT_SECONDS, lease_ttl_seconds=10 * HEARTBEAT_SECONDS)
        fleet.start_engine("e0")
        await fleet.wait_for_engines(1)
        await fleet.take_lease()
        began = time.monotonic()
        for _ in range(2):
            await fleet.push(Weights())

            async def routable() -> bool:
                return (await fleet.engine("e0")).routable

            await eventually(routable)
        assert time.monotonic() - began < HEARTBEAT_SECONDS
    finally:
        await fleet.close()

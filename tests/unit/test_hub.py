"""What the coordinator tells at once, and what it tells together with what comes close to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from controlplane.coordinator.hub import Hub
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Stage
from controlplane.core.fleet import FleetCore
from controlplane.core.versions import UpdateId
from controlplane.ledger import MemoryLedger
from tests.support.fleet_core import POLICY, RUN, Fleet
from weightplane.v1 import engine_pb2, fleet_pb2

READY, UNHEARD = engine_pb2.UPDATE_STAGE_READY, engine_pb2.UPDATE_STAGE_UNSPECIFIED


class Heard(Fleet):
    """Agents whose words a hub hears too."""

    def __init__(self) -> None:
        self.unheard: list[events.Event] = []
        super().__init__()

    def handle(self, event: events.Event) -> list[events.Effect]:
        self.unheard.append(event)
        return super().handle(event)

    async def by(self, hub: Hub) -> None:
        for event in self.unheard:
            await hub.handle(event)
        self.unheard.clear()


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    ledger = MemoryLedger()
    core = FleetCore(Fleet().settings, ledger.open(RUN), 0.0)
    with ThreadPoolExecutor(1) as writer:
        yield Hub(core, ledger, writer, 1.0)


def shown(hub: Hub) -> tuple[int, list[int]]:
    """Phase, and each engine's stage, as somebody is told who asks now."""
    state = hub._updates[UpdateId("u1")].value
    return state.phase, [e.stage for e in state.engines]


async def test_a_phase_is_told_at_once_and_the_engines_reports_before_it_together(hub: Hub) -> None:
    f = Heard()
    engines = {name: f.engine(name) for name in ("e0", "e1", "e2")}
    f.trainer()
    update = f.begin("u1")
    await f.by(hub)
    assert shown(hub) == (fleet_pb2.UPDATE_PHASE_PREPARING, [UNHEARD] * 3)
    for name in ("e0", "e1"):
        f.stage(engines[name], name, update, Stage.READY)
    await f.by(hub)
    assert shown(hub) == (fleet_pb2.UPDATE_PHASE_PREPARING, [UNHEARD] * 3)
    f.stage(engines["e2"], "e2", update, Stage.READY)
    await f.by(hub)
    assert shown(hub) == (fleet_pb2.UPDATE_PHASE_GO, [READY] * 3)


async def test_a_report_that_moves_no_phase_is_told_with_the_next_view(hub: Hub) -> None:
    f = Heard()
    session = f.engine("e0")
    f.engine("e1")
    f.trainer()
    update = f.begin("u1")
    f.stage(session, "e0", update, Stage.READY)
    await f.by(hub)
    publishing = asyncio.create_task(hub.publish_forever())
    async with asyncio.timeout(10):
        async for state in hub.watch_update(RUN, UpdateId("u1")):
            if [e.stage for e in state.engines] == [READY, UNHEARD]:
                break
    publishing.cancel()


def routed(hub: Hub) -> list[str]:
    """Whom somebody is told of who asked before."""
    topic = hub._routes[POLICY, False]
    return [r.engine.engine_id for r in topic.value.routes]


async def test_the_first_engine_that_takes_requests_is_told_at_once_and_the_others_together(hub: Hub) -> None:
    f = Heard()
    engines = {name: f.engine(name) for name in ("e0", "e1")}
    f.trainer()
    await f.by(hub)
    watch = hub.watch_routes(RUN, POLICY, kept=False)
    assert not (await anext(watch)).routes
    update = f.begin("u1")
    for stage in (Stage.READY, Stage.APPLIED):
        for name, session in engines.items():
            f.stage(session, name, update, stage)
    await f.by(hub)
    assert routed(hub) == [], "the gates open with the decision"
    f.report(engines["e1"], "e1")
    await f.by(hub)
    assert routed(hub) == ["e1"]
    f.report(engines["e0"], "e0")
    await f.by(hub)
    assert routed(hub) == ["e1"], "with what comes close to it"
    hub._publish_changes()
    assert routed(hub) == ["e0", "e1"]

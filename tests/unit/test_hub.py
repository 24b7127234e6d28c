"""What the coordinator tells at once, and what it tells together with what comes close to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from controlplane.coordinator.hub import MAX_ENGINES_LOGGED, VIEW_SECONDS, Hub, _in_short
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Stage
from controlplane.core.fleet import FleetCore
from controlplane.core.fleet_records import EngineAsked, EngineKnown, UpdateBegan
from controlplane.core.versions import EngineId, Incarnation, Term, UpdateId, WeightVersion
from controlplane.ledger import MemoryLedger
from tests.support.eventually import eventually
from tests.support.fleet_core import POLICY, RUN, Fleet
from weightplane.v1 import engine_pb2, fleet_pb2

READY, UNHEARD = engine_pb2.UPDATE_STAGE_READY, engine_pb2.UPDATE_STAGE_UNSPECIFIED


class Heard(Fleet):
    """Agents whose words a hub hears too."""

    def __init__(self) -> None:
        self.unheard: list[events.Event] = []
        super().__init__()

    def handle(self, event: events.Event) -> list[fx.Effect]:
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
    state = hub._topics._updates[UpdateId("u1")].value
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
    topic = hub._topics._routes[POLICY, False]
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
    hub._topics.publish()
    assert routed(hub) == ["e0", "e1"]


async def test_a_view_is_seldom_made_while_nobody_looks_and_at_once_for_who_comes(hub: Hub) -> None:
    f = Heard()
    f.engine("e0")
    publishing = asyncio.create_task(hub.publish_forever())
    try:
        await f.by(hub)
        before = hub.view.value
        await asyncio.sleep(2 * VIEW_SECONDS)
        assert hub.view.value is before
        async with asyncio.timeout(5):
            async for view in hub.watch_fleet():
                if view.engines:
                    break
        f.engine("e1")
        await f.by(hub)
        await eventually(lambda: len(hub.view.value.engines) == 2)  # also without anybody
    finally:
        publishing.cancel()


async def test_whether_it_recovers_is_told_without_a_view(hub: Hub) -> None:
    ledger = MemoryLedger()
    ledger.open(RUN)
    ledger.save(EngineKnown(EngineId("e0"), POLICY))
    core = FleetCore(Fleet().settings, ledger.open(RUN), 0.0)
    with ThreadPoolExecutor(1) as writer:
        recovering = Hub(core, ledger, writer, 1.0)
        assert recovering.recovering.value
        f = Heard()
        f.engine("e0")
        await f.by(recovering)
        assert not recovering.recovering.value


def test_of_a_large_fleet_the_log_names_the_first_engines() -> None:
    asked = tuple(EngineAsked(EngineId(f"e{i}"), Incarnation("i"), True) for i in range(MAX_ENGINES_LOGGED + 5))
    few = UpdateBegan(UpdateId("u"), "r", POLICY, WeightVersion(1, Term(1)), 1, asked[:2])
    assert _in_short(few) == str(few)
    text = _in_short(replace(few, engines=asked))
    assert f"e{MAX_ENGINES_LOGGED - 1}'" in text
    assert f"e{MAX_ENGINES_LOGGED}'" not in text
    assert text.endswith(" and 5 more")

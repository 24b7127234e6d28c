"""L2: a restarted process has its predecessor's address and name, and nothing else of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.core.errors import EngineDied
from engine_agent.daemon import agent
from engine_agent.life import progress
from engine_agent.memory.engine import MemoryEngine
from tests.cases.cargo import TRANSPORTS, Transport, refusals, transport_name
from tests.cases.fleet import CaseFleet, case_fleet
from tests.cases.samples import WITHIN, tokens_of
from tests.cases.sessions import Session, number_of
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN
from tests.support.writer import Weights
from weightplane.v1 import engine_pb2, fleet_pb2, lifecycle_pb2, lifecycle_pb2_grpc, operator_pb2, version_pb2


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path) as running:
        yield running


async def reborn(fleet: CaseFleet) -> tuple[operator_pb2.EngineView, operator_pb2.EngineView]:
    """e0 is killed and starts again on its address: as it was before, and as it is."""
    before = await fleet.engine("e0")
    await fleet.crash("e0")
    fleet.start_engine_at("e0", before.endpoint)
    after = await fleet.wait_for_a_life_after(before.status.engine.incarnation)
    assert (after.endpoint, after.status.engine.engine_id) == (before.endpoint, before.status.engine.engine_id)
    return before, after


@pytest.mark.parametrize("transport", TRANSPORTS, ids=transport_name)
async def test_L2_a_restart_on_the_same_address_is_unset_and_unrouted_until_it_has_weights(
    fleet: CaseFleet, transport: Transport
) -> None:
    first, second = Weights(), Weights()
    await fleet.deliver(first, transport)
    views, routes = fleet.note_views(), fleet.note_routes()
    before, after = await reborn(fleet)
    assert (after.status.word, after.routable, number_of(after.status)) == ("empty", False, None)
    with refusals("VERSION_UNAVAILABLE", "ENGINE_NOT_READY"):
        await fleet.generate("e0", 1, min_version=before.status.applied, wait=0.1)
    assert not await fleet.is_routable("e0")
    state = await fleet.deliver(second, transport)
    assert state.engines[0].engine == after.status.engine
    tokens, spans, _ = await fleet.generate("e0", 4)
    assert (tokens, spans) == (tokens_of(second, 4), [(2, 0, 4)])
    await eventually(lambda: fleet.is_routable("e0"))
    told = [(e.status.engine.incarnation, number_of(e.status), e.routable) for v in views.told for e in v.engines]
    assert {t for t in told if t[0] == after.status.engine.incarnation and t[1] == 1} == set(), "the old life's version"
    assert all(number == 2 for life, number, routable in told if routable and life != before.status.engine.incarnation)
    for answer in routes.told:
        for route in answer.routes:
            lives = {before.status.engine.incarnation: 1, after.status.engine.incarnation: 2}
            assert route.applied.number == lives[route.engine.incarnation]


async def test_L2_between_its_death_and_its_return_it_is_unknown_and_nobody_is_sent_there(fleet: CaseFleet) -> None:
    await fleet.deliver(Weights())
    await eventually(lambda: fleet.is_routable("e0"))
    routes = fleet.note_routes()
    await eventually(lambda: bool(routes.told and routes.told[-1].routes))
    await fleet.crash("e0")

    async def is_unknown() -> bool:
        view = await fleet.engine("e0")
        return not view.known and not view.routable

    await eventually(is_unknown)
    await eventually(lambda: not routes.told[-1].routes)


async def test_L2_words_to_the_old_life_are_refused_by_the_new_one(fleet: CaseFleet) -> None:
    """Whoever kept the reference kept the address too, and the address answers."""
    await fleet.deliver(Weights())
    begun = await fleet.begin()
    before, after = await reborn(fleet)
    attempt = fleet.delivery(begun, "e0", fleet.cargo(Weights()))
    with refusals("WRONG_INCARNATION"):
        await attempt.open()
    stub: Any = lifecycle_pb2_grpc.LifecycleStub(fleet.channel(before.endpoint))
    old = before.status.engine
    with refusals("WRONG_INCARNATION"):
        await stub.PauseGeneration(lifecycle_pb2.PauseGenerationRequest(run_id=RUN, engine=old, owner="me"))
    with refusals("WRONG_INCARNATION"):
        await stub.ResumeGeneration(lifecycle_pb2.ResumeGenerationRequest(run_id=RUN, engine=old, owner="me"))
    status = await fleet.status_at(after.endpoint)
    assert (status.word, list(status.holds), status.HasField("update")) == ("empty", [], False)


async def test_L2_an_update_that_was_planned_for_the_old_life_is_lost_with_it(fleet: CaseFleet) -> None:
    """All that the new life does counts for nothing in it."""
    begun = await fleet.begin()
    attempt = fleet.delivery(begun, "e0", fleet.cargo(Weights()))
    await attempt.until_ready()
    before, after = await reborn(fleet)
    state = await fleet.decided(begun.update_id)
    assert state.phase == fleet_pb2.UPDATE_PHASE_FAILED
    assert (state.engines[0].engine, state.engines[0].lost) == (before.status.engine, True)
    direct = fleet.delivery(begun, "e0", fleet.cargo(Weights()), engine=after.status.engine)
    await direct.until_ready()
    await direct.commit()
    await direct.applied()
    view = await fleet.view()
    assert list(view.state.models[0].served) == []
    assert not view.engines[0].routable
    assert view.updates[0].engines[0].lost


async def test_L2_who_watches_an_engine_is_told_of_its_death_and_then_of_its_next_life(
    fleet: CaseFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dies and its agent lives on: a watch of the old life alone would say `dead` for ever."""
    monkeypatch.setattr(progress, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(agent, "RESTART_WAIT_SECONDS", (0.05, 0.05))
    await fleet.deliver(Weights())
    before = await fleet.engine("e0")
    watch, probe = fleet.note_statuses(before.endpoint), MemoryEngine.probe
    await eventually(lambda: bool(watch.told))

    async def dies(self: MemoryEngine) -> None:
        monkeypatch.setattr(MemoryEngine, "probe", probe)
        raise EngineDied(engine_id="e0", cause="the test says so")

    monkeypatch.setattr(MemoryEngine, "probe", dies)
    after = await fleet.wait_for_a_life_after(before.status.engine.incarnation)
    await fleet.deliver(Weights())
    new = after.status.engine.incarnation
    await eventually(lambda: (watch.told[-1].engine.incarnation, number_of(watch.told[-1])) == (new, 2))
    told = [(status.engine.incarnation, status.word) for status in watch.told]
    at = told.index((before.status.engine.incarnation, "dead"))
    assert {life for life, _ in told[:at]} == {before.status.engine.incarnation}
    assert (new, "empty") in told[at:], "the new life is seen from its beginning, without the old one's version"


# ---- the coordinator hears two lives ------------------------------------------------------------


LIVES = {"old": 1, "new": 2}


def hello(incarnation: str, holds: Weights | None) -> fleet_pb2.EngineHello:
    """An agent's first frame; `holds` is what it claims to hold as version 1, and to serve."""
    return fleet_pb2.EngineHello(
        status=said(incarnation, holds),
        incarnation_number=LIVES.get(incarnation, 0),
        endpoint="127.0.0.1:9",
        host_id="a-host",
        device_uuids=["a-device"],
        max_term=1 if holds else 0,
        max_number=1 if holds else 0,
    )


def said(incarnation: str, holds: Weights | None) -> engine_pb2.EngineStatus:
    status = engine_pb2.EngineStatus(
        engine=version_pb2.EngineRef(engine_id="twice", incarnation=incarnation),
        run_id=RUN,
        model="policy",
        life=engine_pb2.ENGINE_LIFE_RUNNING,
        weights=engine_pb2.WEIGHTS_STATE_UNSET,
        residency=engine_pb2.RESIDENCY_AWAKE,
    )
    if holds is not None:
        status.weights = engine_pb2.WEIGHTS_STATE_HELD
        status.applied.CopyFrom(version_pb2.WeightVersion(term=1, number=1))
        status.content_digest = holds.digest
        status.gate_open = True
    return status


async def joined(fleet: CaseFleet, incarnation: str, holds: Weights | None) -> Session:
    session = fleet.session()
    await session.say(engine_hello=hello(incarnation, holds))
    await session.welcome()
    return session


async def is_the_new_life(fleet: CaseFleet) -> None:
    view = await fleet.engine("twice")
    assert (view.status.engine.incarnation, number_of(view.status), view.known, view.routable) == (
        "new",
        None,
        True,
        False,
    )


async def test_L2_old_records_that_said_ready_are_not_the_new_lifes(fleet: CaseFleet) -> None:
    weights = Weights()
    await fleet.deliver(weights)
    old = await joined(fleet, "old", weights)
    await eventually(lambda: fleet.is_routable("twice"))
    await joined(fleet, "new", None)
    await is_the_new_life(fleet)
    assert (await old.end()).reason == "WRONG_INCARNATION"


async def test_L2_an_old_lifes_report_in_its_own_session_is_not_heard_any_more(fleet: CaseFleet) -> None:
    weights = Weights()
    await fleet.deliver(weights)
    old = await joined(fleet, "old", weights)
    new = await joined(fleet, "new", None)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async with asyncio.timeout(WITHIN):
            while True:
                await old.say(engine_status=said("old", weights))
    await is_the_new_life(fleet)
    await new.say(engine_status=said("new", None))
    await is_the_new_life(fleet)


async def test_L2_an_old_lifes_report_in_the_new_ones_session_is_refused(fleet: CaseFleet) -> None:
    weights = Weights()
    await fleet.deliver(weights)
    new = await joined(fleet, "new", None)
    await new.say(engine_status=said("old", weights))
    assert (await new.end()).reason == "WRONG_INCARNATION"
    view = await fleet.engine("twice")
    assert (view.status.engine.incarnation, number_of(view.status), view.routable) == ("new", None, False)


async def test_L2_an_old_life_that_wakes_up_and_says_hello_again_is_refused(fleet: CaseFleet) -> None:
    """It stood still, or was cut off, while its successor came: it never heard that it was replaced."""
    weights = Weights()
    await fleet.deliver(weights)
    old = await joined(fleet, "old", weights)
    old.cut()
    new = await joined(fleet, "new", None)
    zombie = fleet.session()
    await zombie.say(engine_hello=hello("old", weights))
    with refusals("WRONG_INCARNATION"):
        await zombie.hear()
    await is_the_new_life(fleet)
    await new.say(engine_status=said("new", None))
    await is_the_new_life(fleet)


async def test_L2_a_real_agents_first_life_does_not_come_back_over_its_second(fleet: CaseFleet) -> None:
    await fleet.deliver(Weights())
    before, after = await reborn(fleet)
    zombie = fleet.session()
    status = engine_pb2.EngineStatus()
    status.CopyFrom(before.status)
    await zombie.say(
        engine_hello=fleet_pb2.EngineHello(
            status=status,
            endpoint=before.endpoint,
            host_id="h",
            device_uuids=["d"],
            incarnation_number=1,
            max_term=1,
            max_number=1,
        )
    )
    with refusals("WRONG_INCARNATION"):
        await zombie.hear()
    assert (await fleet.engine("e0")).status.engine == after.status.engine


# ---- names --------------------------------------------------------------------------------------


async def test_L2_an_update_for_an_engine_of_another_name_is_refused(fleet: CaseFleet) -> None:
    """An address that is somebody else's by now, or a plan whose entries were swapped."""
    begun = await fleet.begin()
    named = version_pb2.EngineRef(engine_id="somebody-else", incarnation=begun.plan.assignments[0].engine.incarnation)
    attempt = fleet.delivery(begun, "e0", fleet.cargo(Weights()), engine=named)
    with refusals("WRONG_INCARNATION", "UNKNOWN_ENGINE"):
        await attempt.open()


async def test_L2_a_report_under_another_engines_name_does_that_one_no_harm(fleet: CaseFleet) -> None:
    await fleet.deliver(Weights())
    await eventually(lambda: fleet.is_routable("e0"))
    session = await joined(fleet, "life", None)
    begun = await fleet.begin()
    stray = said("life", None)
    stray.engine.engine_id = "e0"
    await session.say(engine_status=stray)
    attempt = fleet.delivery(begun, "e0", fleet.cargo(Weights()))
    await attempt.until_ready()
    await fleet.go(begun.update_id)
    await attempt.commit()
    state = await fleet.decided(begun.update_id)
    assert (state.phase, state.engines[0].lost) == (fleet_pb2.UPDATE_PHASE_COMMITTED, False)

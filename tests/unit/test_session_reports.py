"""When an agent tells the coordinator of its engine: at once what something waits for, the rest a moment later."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.core.engine_state import EngineState, Life, Progress, Stage
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from controlplane.rpc.latest import Latest
from engine_agent.daemon.session import Membership, Session


def state(stage: Stage | None) -> EngineState:
    progress = None if stage is None else Progress(UpdateId("u"), WeightVersion(1, Term(1)), stage)
    return EngineState(RunId("r"), ModelName("m"), EngineId("e"), Incarnation("i"), Life.RUNNING, progress=progress)


def session_of(latest: Latest[EngineState]) -> Session:
    life: Any = SimpleNamespace(state=latest, core=SimpleNamespace(gate_open=False))
    return Session(life, "nowhere:1", "nowhere:2", Membership())


@pytest.mark.parametrize("news", [Stage.READY, Stage.APPLIED, Stage.FAILED, Stage.ABORTED, None])
async def test_what_go_and_the_decision_wait_for_goes_at_once_and_takes_the_place_of_what_led_to_it(
    news: Stage | None,
) -> None:
    before, moving, then = state(None), state(Stage.RECEIVING), state(news)
    latest = Latest(before)
    telling = asyncio.create_task(session_of(latest)._next_state(before))
    for each in (moving, then):
        latest.set(each)
        await asyncio.sleep(0)
    assert await telling is then


@pytest.mark.parametrize("stage", [Stage.RECEIVING, Stage.INSTALLING])
async def test_an_update_that_takes_its_time_is_told_of_too(stage: Stage) -> None:
    before, moving = state(None), state(stage)
    latest = Latest(before)
    telling = asyncio.create_task(session_of(latest)._next_state(before))
    latest.set(moving)
    async with asyncio.timeout(10):
        assert await telling is moving


async def test_inv10_a_gate_that_opens_by_what_the_fleet_serves_is_told_at_once() -> None:
    """The state is the same: it is the served set that changed at the decision."""
    applied = state(Stage.APPLIED)
    latest = Latest(applied)
    session = session_of(latest)
    telling = asyncio.create_task(session._next_state(applied))
    await asyncio.sleep(0)
    session._life.core = SimpleNamespace(gate_open=True)  # type: ignore[assignment]
    latest.set(applied)
    async with asyncio.timeout(0.5):  # half a heartbeat
        assert await telling is applied

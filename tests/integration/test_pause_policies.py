"""What becomes of requests in the engine when an update comes, as its writer said: kept, waited for, or aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.core import engine_events as events
from controlplane.rpc.errors import from_rpc_error
from engine_agent.life.engine_life import EngineLife
from tests.cases.engines import Hand, lay_hands
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.one_engine import ABORT, HELD, KEEP, LONG, WAIT, first_version, one_engine, pause, sample
from tests.support.writer import Weights
from weightplane.v1 import engine_pb2, fleet_pb2, pause_pb2


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[EngineLife]:
    """The engines' lives, as they begin."""
    begun: list[EngineLife] = []
    true = EngineLife.__init__

    def init(self: EngineLife, *args: Any, **options: Any) -> None:
        true(self, *args, **options)
        begun.append(self)

    monkeypatch.setattr(EngineLife, "__init__", init)
    return begun


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    """On the one engine: where a sample must not end before something else is seen."""
    return lay_hands(monkeypatch)["e0"]


@pytest.fixture
async def fleet(tmp_path: Path, lives: list[EngineLife], hand: Hand) -> AsyncIterator[LocalFleet]:
    async with one_engine(tmp_path) as running:
        yield running


@pytest.fixture
async def weights(fleet: LocalFleet) -> Weights:
    return await first_version(fleet)


async def updated(fleet: LocalFleet, policy: pause_pb2.PausePolicy) -> fleet_pb2.UpdateState:
    """A push whose writer says what becomes of requests."""
    begun, weights = await fleet.begin(), Weights()
    stream = fleet.stream(begun, "e0", pause=policy)
    await stream.until_ready(weights)
    await fleet.go(begun.update_id)
    await stream.commit(weights)
    return await fleet.decided(begun.update_id)


async def test_an_update_may_end_the_requests_in_the_engine_with_what_they_have(
    fleet: LocalFleet, weights: Weights
) -> None:
    running = await sample(fleet, LONG)
    await running.has(3)
    await updated(fleet, pause_pb2.PausePolicy(mode=ABORT))
    assert await running.reason() == "ABORT"
    spans = await running.checked_spans({1: weights})
    assert [number for number, _, _ in spans] == [1]


async def test_an_update_may_wait_for_requests_to_end_under_the_version_that_they_began_with(
    fleet: LocalFleet, weights: Weights
) -> None:
    running = await sample(fleet, 100)
    await running.has(3)
    state = await updated(fleet, pause_pb2.PausePolicy(mode=WAIT))
    assert state.version.number == 2
    assert await running.reason() == "LENGTH"
    assert [number for number, _, _ in await running.checked_spans({1: weights})] == [1]


async def test_requests_that_take_longer_than_an_update_waits_are_kept_or_aborted_as_it_says(
    fleet: LocalFleet, weights: Weights
) -> None:
    running = await sample(fleet, LONG)
    await running.has(3)
    policy = pause_pb2.PausePolicy(mode=WAIT, fallback=ABORT)
    policy.wait_limit.FromMilliseconds(50)
    state = await updated(fleet, policy)
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    assert await running.reason() == "ABORT"
    status = await fleet.status("e0")
    assert status.update.timings.wait.ToMilliseconds() >= 50


async def test_nobody_enters_while_an_update_waits(fleet: LocalFleet, weights: Weights, hand: Hand) -> None:
    hand.limit_samples(HELD)
    running = await sample(fleet, 200)
    await running.has(3)
    update = asyncio.create_task(updated(fleet, pause_pb2.PausePolicy(mode=WAIT)))
    await eventually(lambda: _installs(fleet))
    late = await sample(fleet, 2)
    hand.limit_samples(None)
    assert (await update).version.number == 2
    assert await late.reason() == "LENGTH"
    assert late.numbers == [2, 2]


async def _installs(fleet: LocalFleet) -> bool:
    return (await fleet.status("e0")).update.stage == engine_pb2.UPDATE_STAGE_INSTALLING


async def test_inv4_what_is_found_poisoned_while_an_update_waits_makes_no_token_more(
    fleet: LocalFleet, weights: Weights, lives: list[EngineLife]
) -> None:
    running = await sample(fleet, LONG)
    await running.has(3)
    update = asyncio.create_task(updated(fleet, pause_pb2.PausePolicy(mode=WAIT)))
    await eventually(lambda: _installs(fleet))
    lives[-1].apply(events.SpansDisagreed("a test says so"))
    assert (await update).version.number == 2
    assert await running.reason() == "ABORT"


async def test_an_operators_pause_ends_the_wait_of_an_update(fleet: LocalFleet, weights: Weights) -> None:
    running = await sample(fleet, LONG)
    await running.has(3)
    update = asyncio.create_task(updated(fleet, pause_pb2.PausePolicy(mode=WAIT)))
    await eventually(lambda: _installs(fleet))
    await pause(fleet, mode=KEEP)
    assert (await update).version.number == 2
    assert running.running


async def test_an_update_that_would_wait_longer_than_its_fleet_is_refused(fleet: LocalFleet, weights: Weights) -> None:
    policy = pause_pb2.PausePolicy(mode=WAIT)
    policy.wait_limit.FromSeconds(91)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await updated(fleet, policy)
    assert "waits 90 s for requests at most, not 91" in str(from_rpc_error(error.value))

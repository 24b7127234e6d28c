"""Pausing, ending requests and emptying caches, over real gRPC, with requests in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.core.errors import DeadlineExceeded
from controlplane.core.sample_spans import PAUSED
from controlplane.rpc.errors import from_rpc_error
from engine_agent.memory.engine import MemoryEngine
from tests.cases.engines import Hand, lay_hands
from tests.support.eventually import eventually
from tests.support.holds import kinds_held
from tests.support.local_fleet import LocalFleet
from tests.support.one_engine import (
    ABORT,
    HELD,
    KEEP,
    LONG,
    WAIT,
    first_version,
    is_open,
    one_engine,
    pause,
    resume,
    sample,
    told,
)
from tests.support.refusals import reason_of
from tests.support.writer import Weights
from weightplane.v1 import fleet_pb2, lifecycle_pb2


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    """On the one engine: where a sample must not end before something else is seen."""
    return lay_hands(monkeypatch)["e0"]


@pytest.fixture
async def fleet(tmp_path: Path, hand: Hand) -> AsyncIterator[LocalFleet]:
    async with one_engine(tmp_path) as running:
        yield running


@pytest.fixture
async def weights(fleet: LocalFleet) -> Weights:
    return await first_version(fleet)


async def flush(fleet: LocalFleet) -> None:
    await told(fleet, "FlushCache", lifecycle_pb2.FlushCacheRequest)


# ---- pause --------------------------------------------------------------------------------------


async def test_keep_lets_requests_stand_still_and_go_on_afterwards(fleet: LocalFleet, weights: Weights) -> None:
    one = await sample(fleet, 100)
    await one.has(5)
    assert (await pause(fleet, mode=KEEP)).aborted_requests == 0
    await resume(fleet)
    assert await one.checked_spans({1: weights}) == [(1, 0, 100)]


async def test_abort_ends_each_request_with_the_spans_of_its_tokens(fleet: LocalFleet, weights: Weights) -> None:
    samples = [await sample(fleet, LONG) for _ in range(3)]
    for one in samples:
        await one.has(5)
    answer = await pause(fleet, mode=ABORT)
    assert answer.aborted_requests == 3
    assert kinds_held(answer.status) == {"OPERATOR"}
    for one in samples:
        assert (await one.reason(), (await one.end()).stop_reason) == ("ABORT", PAUSED)
        assert await one.checked_spans({1: weights})
    await resume(fleet)
    assert await (await sample(fleet, 5)).reason() == "LENGTH"


async def test_wait_lets_requests_end_and_nobody_in(fleet: LocalFleet, weights: Weights, hand: Hand) -> None:
    hand.limit_samples(HELD)
    one = await sample(fleet, 100)
    await one.has(5)
    pausing = asyncio.create_task(pause(fleet, mode=WAIT))
    await eventually(lambda: _held(fleet, "FINISHING"))
    outside = await sample(fleet, 5)
    hand.limit_samples(None)
    answer = await pausing
    assert (answer.aborted_requests, kinds_held(answer.status)) == (0, {"OPERATOR"})
    assert await one.reason() == "LENGTH"
    assert outside.stamps == []
    await resume(fleet)
    assert await outside.reason() == "LENGTH"


async def _held(fleet: LocalFleet, kind: str) -> bool:
    return kind in kinds_held(await fleet.status("e0"))


@pytest.mark.parametrize(("fallback", "aborted"), [(ABORT, 1), (KEEP, 0)], ids=["abort", "keep"])
async def test_a_wait_that_is_too_long_ends_as_was_said(
    fleet: LocalFleet, weights: Weights, fallback: Any, aborted: int
) -> None:
    one = await sample(fleet, LONG)
    await one.has(5)
    request = lifecycle_pb2.PauseGenerationRequest()
    request.wait_limit.FromMilliseconds(200)
    answer = await pause(fleet, mode=WAIT, wait_limit=request.wait_limit, fallback=fallback)
    assert (answer.aborted_requests, kinds_held(answer.status)) == (aborted, {"OPERATOR"})
    assert one.running is not bool(aborted) or await one.reason() == "ABORT"


async def test_an_update_comes_while_requests_are_let_finish_and_they_go_on_under_it(
    fleet: LocalFleet, weights: Weights
) -> None:
    one = await sample(fleet, LONG)
    await one.has(5)
    pausing = asyncio.create_task(pause(fleet, mode=WAIT))
    await eventually(lambda: _held(fleet, "FINISHING"))
    second = Weights()
    assert (await fleet.push(second)).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    count = len(one.stamps)
    await one.has(count + 5)
    await resume(fleet)
    assert kinds_held((await pausing).status) == set()
    await told(fleet, "AbortRequests", lifecycle_pb2.AbortRequestsRequest)
    spans = await one.checked_spans({1: weights, 2: second})
    assert [number for number, _, _ in spans] == [1, 2]


async def test_what_follows_a_wait_is_no_other_wait(fleet: LocalFleet, weights: Weights) -> None:
    assert await reason_of(pause(fleet, mode=WAIT, fallback=WAIT)) == "INVALID_REQUEST"
    assert await is_open(fleet)


async def test_who_stops_waiting_for_a_pause_does_not_end_it(fleet: LocalFleet, weights: Weights, hand: Hand) -> None:
    hand.limit_samples(HELD)
    one = await sample(fleet, 100)
    await one.has(5)
    pausing = asyncio.create_task(pause(fleet, mode=WAIT))
    await eventually(lambda: _held(fleet, "FINISHING"))
    pausing.cancel()
    hand.limit_samples(None)
    assert await one.reason() == "LENGTH"
    await eventually(lambda: _held(fleet, "OPERATOR"))
    assert kinds_held(await fleet.status("e0")) == {"OPERATOR"}


# ---- requests -----------------------------------------------------------------------------------


async def test_only_the_requests_that_are_named_end_and_those_once(fleet: LocalFleet, weights: Weights) -> None:
    one, other = await sample(fleet, LONG, "one"), await sample(fleet, 100, "other")
    await one.has(5)
    await other.has(5)
    named = {"request_ids": ["one", "nobody", "one"]}
    ended = await told(fleet, "AbortRequests", lifecycle_pb2.AbortRequestsRequest, **named)
    assert list(ended.request_ids) == ["one"]
    assert await one.reason() == "ABORT"
    assert await one.checked_spans({1: weights})
    assert await other.checked_spans({1: weights}) == [(1, 0, 100)]


# ---- caches -------------------------------------------------------------------------------------


@pytest.fixture
def clearings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each time that the engine's caches were cleared by a command."""
    noted: list[bool] = []
    clear = MemoryEngine.clear_caches

    async def note(engine: MemoryEngine) -> None:
        await clear(engine)
        noted.append(True)

    monkeypatch.setattr(MemoryEngine, "clear_caches", note)
    return noted


async def test_a_flush_ends_no_request_and_borders_no_span(
    fleet: LocalFleet, weights: Weights, clearings: list[bool]
) -> None:
    one = await sample(fleet, 100)
    await one.has(5)
    await flush(fleet)
    assert clearings == [True]
    assert await one.checked_spans({1: weights}) == [(1, 0, 100)]


async def test_R3_an_engine_that_does_not_stand_still_in_time_for_a_flush_names_its_requests_and_serves_on(
    fleet: LocalFleet, weights: Weights, clearings: list[bool], monkeypatch: pytest.MonkeyPatch, hand: Hand
) -> None:
    hand.limit_samples(HELD)
    one = await sample(fleet, 100, "slow")
    await one.has(5)
    asked = []

    async def never(engine: MemoryEngine) -> Any:
        asked.append(engine)
        raise DeadlineExceeded(phase="quiesce", waited_for="e0", waited_seconds=1.0)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryEngine, "quiesce", never)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await flush(fleet)
    assert str(from_rpc_error(error.value)) == "quiesce: waited 1.0 s for e0, with 1 requests: slow"
    assert clearings == []
    assert len(asked) == 1
    hand.limit_samples(None)
    assert await one.checked_spans({1: weights}) == [(1, 0, 100)]
    assert await (await sample(fleet, 5)).reason() == "LENGTH"


async def test_a_flush_opens_no_gate(fleet: LocalFleet, weights: Weights, clearings: list[bool]) -> None:
    await pause(fleet)
    await flush(fleet)
    assert clearings == [True]
    assert not await is_open(fleet)


async def test_a_draining_engines_requests_go_on_after_a_flush_also_under_a_version_of_yesterday(
    fleet: LocalFleet, weights: Weights
) -> None:
    one = await sample(fleet, 100)
    await one.has(5)
    await told(fleet, "Drain", lifecycle_pb2.DrainRequest, owner="ann")
    await flush(fleet)
    assert await one.checked_spans({1: weights}) == [(1, 0, 100)]


async def test_an_engine_that_sleeps_has_no_cache_to_flush(fleet: LocalFleet, weights: Weights) -> None:
    await told(fleet, "Sleep", lifecycle_pb2.SleepRequest, owner="ann", level=1)
    assert await reason_of(flush(fleet)) == "ENGINE_ASLEEP"

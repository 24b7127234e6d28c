"""An engine agent that is told to end: who is in its engine goes on to the end, for a while; nobody else enters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.support.checkpoint_fleet import Person, checkpoint_fleet
from tests.support.local_fleet import LocalFleet
from tests.support.writer import Weights

TOKENS = 50
MADE = (TOKENS, [(1, 0, TOKENS)], "FINISH_REASON_LENGTH")
Sample = asyncio.Task[tuple[list[int], list[tuple[int, int, int]], str]]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with checkpoint_fleet(tmp_path, 1, {"seconds_per_token": 0.02}) as running:
        await running.push(Weights())
        yield running


def made(sample: Sample) -> tuple[int, list[tuple[int, int, int]], str]:
    tokens, spans, reason = sample.result()
    return len(tokens), spans, reason


async def test_a_stop_lets_a_request_finish(fleet: LocalFleet) -> None:
    sample = await fleet.sample_in("e0", TOKENS)
    assert await fleet.stop("e0") == 0
    await asyncio.wait({sample}, timeout=60)
    assert made(sample) == MADE


async def test_a_stop_of_an_engine_that_drains_lets_its_requests_finish_too(fleet: LocalFleet) -> None:
    sample = await fleet.sample_in("e0", TOKENS)
    await Person(fleet, "e0").drain()
    assert await fleet.stop("e0") == 0
    await asyncio.wait({sample}, timeout=60)
    assert made(sample) == MADE


async def test_a_stop_waits_for_no_request_that_stands_still(fleet: LocalFleet) -> None:
    sample = await fleet.sample_in("e0", 40 * TOKENS)
    await Person(fleet, "e0").pause()
    began = time.monotonic()
    assert await fleet.stop("e0") == 0
    assert time.monotonic() - began < 18, "its limit is 20 s"
    with pytest.raises(grpc.aio.AioRpcError):
        await sample

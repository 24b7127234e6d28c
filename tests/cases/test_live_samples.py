"""V7, V10: samples that run while versions change under them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.core.errors import InstallFailed
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from tests.cases.engines import Hands
from tests.cases.fleet import CaseFleet, case_fleet
from tests.cases.samples import PROMPT, WITHIN, LiveSample, tokens_of
from tests.support.eventually import eventually
from tests.support.writer import Weights
from weightplane.v1 import engine_pb2, fleet_pb2

STREAMS = 16
LENGTH = 120
"""Tokens of a sample. Its last one waits until the test says so: no sample is over before the updates are."""


@pytest.fixture
async def fleet(tmp_path: Path, hands: Hands) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path, memory={"seconds_per_token": 0.002}) as running:
        yield running


async def sixteen(fleet: CaseFleet, hands: Hands) -> list[LiveSample]:
    """Samples in the middle of their way."""
    hands["e0"].limit_samples(LENGTH - 1)
    samples = [await fleet.sample("e0", LENGTH) for _ in range(STREAMS)]
    await asyncio.gather(*(s.has(5) for s in samples))
    return samples


async def all_run(fleet: CaseFleet, samples: list[LiveSample]) -> None:
    assert all(s.running for s in samples)
    assert (await fleet.status("e0")).live_requests == len(samples)


async def test_V7_sixteen_live_streams_go_on_over_updates_and_end_as_they_would_have(
    fleet: CaseFleet, hands: Hands
) -> None:
    made_by = {1: Weights()}
    await fleet.deliver(made_by[1])
    samples = await sixteen(fleet, hands)
    for number in (2, 3):
        made_by[number] = Weights()
        state = await fleet.deliver(made_by[number], count=8)
        assert (state.phase, state.version.number) == (fleet_pb2.UPDATE_PHASE_COMMITTED, number)
        await all_run(fleet, samples)
    hands["e0"].limit_samples(None)
    for sample in samples:
        assert await sample.reason() == "LENGTH"
        spans = await sample.checked_spans(made_by)
        assert (spans[0][0], spans[-1][0], spans[-1][2]) == (1, 3, LENGTH)


async def test_V7_what_comes_to_nothing_leaves_no_trace_in_live_streams(fleet: CaseFleet, hands: Hands) -> None:
    """Updates that are begun, received, given up, refused, or that fail before their first byte."""
    weights = Weights()
    await fleet.deliver(weights)
    samples = await sixteen(fleet, hands)
    endpoint = (await fleet.engine("e0")).endpoint
    for kind in ("cut", "wrong_bytes", "install"):
        begun = await fleet.begin()
        cargo = fleet.cargo(Weights(), count=1)
        attempt = fleet.delivery(begun, "e0", cargo)
        if kind == "wrong_bytes":
            await attempt.open()
            chunk = cargo.chunk(begun.version, 0)
            chunk.records[0].checksum = b"not this"
            await attempt.stream.send(chunk=chunk)
        else:
            await attempt.until_ready()
        if kind == "cut":
            attempt.stream.cut()
        if kind == "install":
            hands["e0"].fail("first_byte", InstallFailed("e0", "1.4", touched=False, cause="no room"))
            await fleet.go(begun.update_id)
            await attempt.commit()
        assert (await fleet.decided(begun.update_id)).phase == fleet_pb2.UPDATE_PHASE_FAILED
        await fleet.say_until(endpoint, lambda s: s.update.stage == engine_pb2.UPDATE_STAGE_ABORTED and s.gate_open)
        await all_run(fleet, samples)
    hands["e0"].limit_samples(None)
    for sample in samples:
        assert await sample.reason() == "LENGTH"
        assert await sample.checked_spans({1: weights}) == [(1, 0, LENGTH)]


async def test_V10_an_old_sample_that_ends_under_a_new_version_looks_as_old_as_it_is(
    fleet: CaseFleet, hands: Hands
) -> None:
    old, new = Weights(), Weights()
    await fleet.deliver(old)
    hands["e0"].limit_samples(9)
    sample = await fleet.sample("e0", 10)
    await sample.has(9)
    await fleet.deliver(new)
    assert sample.numbers == [1] * 9
    hands["e0"].limit_samples(None)
    assert await sample.checked_spans({1: old, 2: new}) == [(1, 0, 9), (2, 9, 10)]
    whole_before = await fleet.generate("e0", 10)
    assert whole_before[1] == [(2, 0, 10)]


async def test_V10_each_token_is_stamped_as_it_is_made_and_never_again(fleet: CaseFleet, hands: Hands) -> None:
    """Three samples at three places cross two borders. What a caller has heard already is compared with the end."""
    made_by = {1: Weights()}
    await fleet.deliver(made_by[1])
    hands["e0"].limit_samples(20)
    samples = [await fleet.sample("e0", length) for length in (60, 45, 30)]
    heard: list[list[tuple[int, int]]] = [[] for _ in samples]
    for number, limit in ((2, 20), (3, 40)):
        hands["e0"].limit_samples(limit)
        for place, sample in enumerate(samples):
            await sample.has(min(limit, (60, 45, 30)[place]))
            assert sample.stamps[: len(heard[place])] == heard[place]
            heard[place] = list(sample.stamps)
        made_by[number] = Weights()
        await fleet.deliver(made_by[number])
    hands["e0"].limit_samples(None)
    spans = [await sample.checked_spans(made_by) for sample in samples]
    assert spans == [
        [(1, 0, 20), (2, 20, 40), (3, 40, 60)],
        [(1, 0, 20), (2, 20, 40), (3, 40, 45)],
        [(1, 0, 20), (2, 20, 30)],
    ]
    for sample, before in zip(samples, heard, strict=True):
        assert sample.stamps[: len(before)] == before


async def test_V10_the_rollout_clients_sample_has_the_same_spans(fleet: CaseFleet, hands: Hands) -> None:
    old, new = Weights(), Weights()
    await fleet.deliver(old)
    hands["e0"].limit_samples(7)
    engine = hands["e0"].engine
    assert engine is not None
    async with RolloutClient(fleet.address) as rollouts:
        whole = asyncio.create_task(rollouts.generate(PROMPT, SamplingSettings(max_tokens=12)))
        streamed = rollouts.stream(PROMPT, SamplingSettings(max_tokens=8))
        heard = [await anext(streamed) for _ in range(7)]
        await eventually(lambda: engine.made == [7, 7], within=WITHIN)
        await fleet.deliver(new)
        hands["e0"].limit_samples(None)
        sample = await whole
        heard += [delta async for delta in streamed]
    assert [(s.version.number, s.start, s.end) for s in sample.spans] == [(1, 0, 7), (2, 7, 12)]
    assert list(sample.tokens) == tokens_of(old, 12)[:7] + tokens_of(new, 12)[7:]
    assert [d.version.number for d in heard if d.version is not None] == [1] * 7 + [2]

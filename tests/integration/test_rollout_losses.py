"""An engine dies or is updated in the middle of a sample: what becomes of it is the caller's to say. Real agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.core.errors import EngineDied, PeerLost
from controlplane.core.sample_spans import UPDATING
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import EngineId
from controlplane.rollout.asking import OnLoss
from controlplane.rollout.client import RolloutClient
from controlplane.rollout.sample import Sample
from engine_agent.memory.engine import token_of
from tests.cases.engines import Hands
from tests.cases.fleet import CaseFleet, case_fleet
from tests.cases.samples import PROMPT, VOCAB_SIZE, tokens_of, truth
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN
from tests.support.writer import Weights
from weightplane.v1 import pause_pb2

HAD, LENGTH = 3, 8


@pytest.fixture
async def fleet(tmp_path: Path, hands: Hands) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path, engines=2) as running:
        yield running


async def cut_by_death(fleet: CaseFleet, hands: Hands, on_loss: OnLoss) -> tuple[EngineId, Sample]:
    """A sample whose engine dies when it has some tokens; the engine's name, and what the client made of it."""
    async with RolloutClient(fleet.address, run_id=RUN, on_loss=on_loss, wait_seconds=60) as rollouts:
        for engine_id in ("e0", "e1"):
            hands[engine_id].limit_samples(HAD)
        asked = asyncio.create_task(rollouts.generate(PROMPT, SamplingSettings(max_tokens=LENGTH)))
        dead = await eventually(lambda: holder_of_a_sample(hands))
        engine = hands[dead].engine
        assert engine is not None
        engine.die("its device fell off the bus")
        for hand in hands.values():
            hand.limit_samples(None)
        return EngineId(dead), await asked


async def holder_of_a_sample(hands: Hands) -> str:
    """The engine in which it has so many tokens."""
    found = [e for e, hand in hands.items() if hand.engine is not None and hand.engine.made == [HAD]]
    assert found
    return found[0]


async def test_inv11_a_resumed_sample_is_what_the_other_engine_makes_of_the_tokens_so_far(
    fleet: CaseFleet, hands: Hands
) -> None:
    weights = Weights()
    await fleet.deliver(weights)
    dead, sample = await cut_by_death(fleet, hands, "resume")
    had = tokens_of(weights, HAD)
    rest = [token_of(truth(weights), (*PROMPT, *had), i, VOCAB_SIZE) for i in range(LENGTH - HAD)]
    assert list(sample.tokens) == had + rest
    assert [(s.version.number, s.start, s.end) for s in sample.spans] == [(1, 0, LENGTH)]
    assert sample.engine_id != dead
    assert sample.prompt_tokens == len(PROMPT)


async def test_a_restarted_sample_is_what_one_engine_makes_by_itself(fleet: CaseFleet, hands: Hands) -> None:
    weights = Weights()
    await fleet.deliver(weights)
    dead, sample = await cut_by_death(fleet, hands, "restart")
    assert list(sample.tokens) == tokens_of(weights, LENGTH)
    assert sample.engine_id != dead


async def test_a_sample_that_shall_fail_fails_with_its_engine(fleet: CaseFleet, hands: Hands) -> None:
    await fleet.deliver(Weights())
    with pytest.raises((EngineDied, PeerLost)):
        await cut_by_death(fleet, hands, "fail")


async def cut_by_an_update(fleet: CaseFleet, hands: Hands, rollouts: RolloutClient, after: Weights) -> Sample:
    """What a client makes of a sample with some tokens when an update ends its requests."""
    for engine_id in ("e0", "e1"):
        hands[engine_id].limit_samples(HAD)
    asked = asyncio.create_task(rollouts.generate(PROMPT, SamplingSettings(max_tokens=LENGTH)))
    await eventually(lambda: holder_of_a_sample(hands))
    await fleet.deliver(after, pause=pause_pb2.PausePolicy(mode=pause_pb2.PAUSE_MODE_ABORT))
    for hand in hands.values():
        hand.limit_samples(None)
    return await asked


@pytest.mark.parametrize("by_hand", [False, True], ids=["resume", "prefix"])
async def test_inv11_a_sample_that_an_update_cuts_goes_on_under_the_new_version_and_its_spans_show_both(
    fleet: CaseFleet, hands: Hands, by_hand: bool
) -> None:
    before, after = Weights(), Weights()
    await fleet.deliver(before)
    on_loss: OnLoss = "fail" if by_hand else "resume"
    async with RolloutClient(fleet.address, run_id=RUN, on_loss=on_loss, wait_seconds=60) as rollouts:
        sample = await cut_by_an_update(fleet, hands, rollouts, after)
        had = tokens_of(before, HAD)
        if by_hand:
            assert (list(sample.tokens), sample.finish_reason, sample.stop_reason) == (had, "abort", UPDATING)
            sample = await rollouts.generate(PROMPT, SamplingSettings(max_tokens=LENGTH), prefix=sample)
    rest = [token_of(truth(after), (*PROMPT, *had), i, VOCAB_SIZE) for i in range(LENGTH - HAD)]
    assert (list(sample.tokens), sample.finish_reason) == (had + rest, "length")
    assert [(s.version.number, s.start, s.end) for s in sample.spans] == [(1, 0, HAD), (2, HAD, LENGTH)]

"""A rollout in slime's shape on real agents, with an update in its middle: each token is what its version makes."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from controlplane.rollout.adapters.slime import generate_rollout
from controlplane.rollout.sample import SPANS_KEY
from engine_agent.memory.engine import token_of, weights_of
from tests.cases.engines import Hand, Hands, lay_hands
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet, local_fleet
from tests.support.slime_types import DataSource, Sample, arguments, word_tokenizer
from tests.support.writer import SHAPES, Weights

TOKENS = 60
CUT = 30
VOCAB = 256


def said_by(weights: Weights, prompt: list[int], position: int) -> int:
    digests = {name: hashlib.sha256(part).digest() for name, part in zip(SHAPES, weights.parts, strict=True)}
    return token_of(weights_of(digests), prompt, position, VOCAB)


def untrue(sample: Sample, versions: dict[int, Weights], begun_at: int) -> list[int]:
    """Places of tokens that their version did not make. Another request went on from `begun_at`, with what was there as
    its prompt."""
    prompt_tokens = len(sample.tokens) - sample.response_length
    found = []
    for number, _, start, end in sample.metadata[SPANS_KEY]:
        for i in range(start, end):
            first = begun_at if i >= begun_at else 0
            asked = sample.tokens[: prompt_tokens + first]
            if sample.tokens[prompt_tokens + i] != said_by(versions[number], asked, i - first):
                found.append(i)
    return found


def limit(hands: Hands, tokens: int | None) -> None:
    for engine_id in ("e0", "e1"):
        hands[engine_id].limit_samples(tokens)


def made_by(hand: Hand) -> list[int]:
    return [] if hand.engine is None else hand.engine.made


async def running(fleet: LocalFleet) -> bool:
    return sum([(await fleet.status(f"e{i}")).live_requests for i in range(2)]) >= 4


async def test_inv11_samples_of_a_partial_rollout_are_true_span_by_span_over_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = lay_hands(monkeypatch)
    limit(hands, CUT)
    async with local_fleet(tmp_path, seconds_per_token=0.01, max_requests=2) as fleet:
        versions = {1: Weights(), 2: Weights()}
        await fleet.push(versions[1])
        source = DataSource([[1, 2], [3, 4], [5, 6]])
        args = arguments(fleet.address, word_tokenizer(tmp_path / "words", VOCAB), rollout_max_response_len=TOKENS)
        args.partial_rollout, args.rollout_batch_size, args.over_sampling_batch_size = True, 1, 3

        rolling = asyncio.create_task(asyncio.to_thread(generate_rollout, args, 0, source))
        await eventually(lambda: running(fleet))
        await fleet.push(versions[2])
        await eventually(lambda: [m for hand in hands.values() for m in made_by(hand)] == [CUT] * 4)
        limit(hands, None)
        await eventually(lambda: all(made < CUT for hand in hands.values() for made in made_by(hand)))
        limit(hands, CUT)  # who came after the first ones is in its middle when it is cut
        (first,) = await rolling
        for sample in first:
            sample.check()
            assert (sample.response_length, sample.weight_versions) == (TOKENS, ["1", "2"])
            assert untrue(sample, versions, begun_at=TOKENS) == []
        assert len(source.buffer) == 2
        cut = {sample.index: sample.response_length for group in source.buffer for sample in group}
        assert min(cut.values()) < TOKENS

        limit(hands, None)
        args.rollout_batch_size = args.over_sampling_batch_size = 2
        for sample in [s for group in await asyncio.to_thread(generate_rollout, args, 1, source) for s in group]:
            sample.check()
            assert sample.response_length == TOKENS
            assert untrue(sample, versions, begun_at=cut[sample.index]) == []

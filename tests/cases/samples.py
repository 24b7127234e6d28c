"""Samples under test: each token is noted as it comes, with the version that its own message carried."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from controlplane.rpc.latest import Latest
from engine_agent.memory.engine import token_of, weights_of
from tests.support.writer import LAYOUT, Weights
from weightplane.v1 import rollout_pb2

PROMPT = (1, 2, 3)
VOCAB_SIZE = 256
WITHIN = 60.0
"""Seconds that nothing here takes, on a busy machine too."""

Span = tuple[int, int, int]
"""(number, first token, one past the last)."""


def truth(weights: Weights) -> bytes:
    """What an in-memory engine computes its tokens from when it holds these weights."""
    named = zip(LAYOUT.tensors, weights.parts, strict=True)
    return weights_of({tensor.name: hashlib.sha256(part).digest() for tensor, part in named})


def tokens_of(weights: Weights, count: int) -> list[int]:
    """The tokens that these weights make, and no others."""
    return [token_of(truth(weights), PROMPT, i, VOCAB_SIZE) for i in range(count)]


class LiveSample:
    """One Generate call, read as fast as it comes."""

    def __init__(self, call: Any) -> None:
        self.stamps: list[tuple[int, int]] = []
        """(token, number of the version that its message named)."""
        self._call = call
        self._finish: rollout_pb2.Finish | None = None
        self._count = Latest(0)
        self._task = asyncio.create_task(self._read())

    @property
    def running(self) -> bool:
        return not self._task.done()

    @property
    def numbers(self) -> list[int]:
        return [number for _, number in self.stamps]

    async def has(self, count: int) -> None:
        """Wait for at least so many tokens."""
        await self._count.wait_for(lambda n: n >= count, WITHIN)

    async def end(self) -> rollout_pb2.Finish:
        """Wait for the last message. Raises what the call ended with instead."""
        await asyncio.wait_for(asyncio.shield(self._task), WITHIN)
        assert self._finish is not None, "the stream ended without a finish"
        return self._finish

    async def reason(self) -> str:
        return rollout_pb2.FinishReason.Name((await self.end()).reason).removeprefix("FINISH_REASON_")

    async def checked_spans(self, made_by: Mapping[int, Weights]) -> list[Span]:
        """The final spans, once they were found to be exactly what was stamped token by token, and each stamp true."""
        spans = [(s.version.number, s.start, s.end) for s in (await self.end()).spans]
        assert spans == _spans_of(self.numbers)
        truths = {number: truth(weights) for number, weights in made_by.items()}
        wrong = [
            position
            for position, (token, number) in enumerate(self.stamps)
            if token != token_of(truths[number], PROMPT, position, VOCAB_SIZE)
        ]
        assert wrong == [], f"these tokens were not made by the version that they are stamped with: {wrong}"
        return spans

    async def _read(self) -> None:
        async for response in self._call:
            if response.HasField("finish"):
                self._finish = response.finish
            assert response.HasField("version") or not response.token_ids, "tokens without a version"
            self.stamps += [(token, response.version.number) for token in response.token_ids]
            self._count.set(len(self.stamps))


def _spans_of(numbers: Sequence[int]) -> list[Span]:
    spans: list[Span] = []
    for position, number in enumerate(numbers):
        if spans and spans[-1][0] == number:
            spans[-1] = (number, spans[-1][1], position + 1)
        else:
            spans.append((number, position, position + 1))
    return spans

"""What the weights of each step are and which tokens they make, computed without any engine.

An in-memory engine's tokens are a hash of its weights and are compared as they are. A vLLM engine's are compared with
what transformers makes of the same weights, each given the tokens before it: a sample that crosses a border between two
versions is judged too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from controlplane.core.layout import content_digest
from engine_agent.memory.engine import token_of, weights_of
from tests.support.reference import Reference
from tests.support.tiny_rank import TinyWeights
from tests.support.toy_rank import tensors_of

PROMPT = (1, 2, 3)
VOCABULARY = 256
SAMPLE_TOKENS = 4
MARGIN = 0.01
"""How far a vLLM engine's greedy token may lie below transformers' best, in nats: vLLM and transformers round
differently (by about 1e-5 in float32), while a token of other weights lies within this only by a chance of 1 in 500."""

TensorsOf = Callable[[int], Mapping[str, torch.Tensor]]
"""The weights of a step, in the order of the layout."""


class Truth(Protocol):
    """About one engine."""

    def content(self, step: int) -> bytes:
        """The content digest of the step's weights."""
        ...

    def makes(self, step: int, tokens: Sequence[int], start: int, end: int) -> bool:
        """Whether the step's weights make `tokens[start:end]`, after the prompt and the tokens before them."""
        ...


class MemoryTruth:
    """About an in-memory engine that is pushed these weights."""

    def __init__(self, weights: TensorsOf = tensors_of) -> None:
        self._weights = weights

    def content(self, step: int) -> bytes:
        return _content(self._weights, step)

    def tokens(self, step: int) -> tuple[int, ...]:
        """All that a sample may be."""
        return _memory_tokens(self._weights, step)

    def makes(self, step: int, tokens: Sequence[int], start: int, end: int) -> bool:
        return tuple(tokens[start:end]) == self.tokens(step)[start:end]


class VllmTruth:
    """About a vLLM engine that is pushed the `TinyWeights` of a model's directory."""

    def __init__(self, model: Path) -> None:
        self._weights = TinyWeights(model).tensors_of
        self._reference = Reference(model)
        self._shortfalls = cache(self._ask)

    def content(self, step: int) -> bytes:
        return _content(self._weights, step)

    def makes(self, step: int, tokens: Sequence[int], start: int, end: int) -> bool:
        return all(short <= MARGIN for short in self._shortfalls(step, tuple(tokens))[start:end])

    def _ask(self, step: int, tokens: tuple[int, ...]) -> list[float]:
        return self._reference.shortfalls(self._weights(step), PROMPT, tokens)


@cache
def _content(weights: TensorsOf, step: int) -> bytes:
    return content_digest([xxhash.xxh3_64_digest(part) for part in _parts(weights, step).values()])


@cache
def _memory_tokens(weights: TensorsOf, step: int) -> tuple[int, ...]:
    held = weights_of({name: hashlib.sha256(part).digest() for name, part in _parts(weights, step).items()})
    return tuple(token_of(held, PROMPT, i, VOCABULARY) for i in range(SAMPLE_TOKENS))


def _parts(weights: TensorsOf, step: int) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in weights(step).items()}

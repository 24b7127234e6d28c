"""What engines say after an install, and whether it is what these weights should say.

An engine speaks a fixed prompt after each install. That its numbers are finite says that it speaks; that they are right
is known only by comparison: with the trainer's own log probabilities where the update brought some, else with engines
that are equal in all that changes an answer (their *likeness*) and hold the same bytes. Of at least three, those that
a strict majority contradicts are doubted. Where neither is possible nothing is claimed: the version is *unverified*.

Only log probabilities are compared: decoded tokens hang on near-ties, in which equal engines may differ.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from controlplane.core.versions import EngineId

AT_LEAST = 3
"""Equal engines, for a majority that means something."""
MAX_REFERENCE_TOKENS = 64
MAX_CANDIDATES = 64
"""Different answers that are each compared with all: a thousand engines' pairs would take seconds."""


class Verification(Enum):
    """By what a version's weights in an engine were found right."""

    UNVERIFIED = "unverified"
    """It speaks; nobody knows what it should say."""
    MAJORITY = "majority"
    """It says what most of at least three equal engines say."""
    REFERENCE = "reference"
    """It says what the trainer said of the same weights."""


@dataclass(frozen=True, slots=True)
class Canary:
    """What an engine said of its weights after they were installed."""

    prompt_logprobs: tuple[float, ...]
    """Natural log; entry i belongs to the fixed prompt's token i + 1."""
    tokens: tuple[int, ...] = ()
    """A few greedily decoded tokens, for people."""
    by_reference: bool = False
    """It also said what the trainer's own log probabilities are."""


@dataclass(frozen=True, slots=True)
class CanaryReference:
    """The trainer's own log probabilities of a prompt under the weights of an update."""

    prompt_token_ids: tuple[int, ...]
    """2 to MAX_REFERENCE_TOKENS."""
    prompt_logprobs: tuple[float, ...]
    """Natural log; entry i belongs to token i + 1."""
    tolerance: float
    """Largest difference of any one of them that is still the same model."""

    def problem(self) -> str:
        """Why it cannot be compared with; empty if it can."""
        tokens, scored = len(self.prompt_token_ids), len(self.prompt_logprobs)
        if not 2 <= tokens <= MAX_REFERENCE_TOKENS:
            return f"{tokens} tokens, not 2 to {MAX_REFERENCE_TOKENS}"
        if scored != tokens - 1:
            return f"{scored} log probabilities for {tokens} tokens, of which the first has none"
        if not all(map(math.isfinite, self.prompt_logprobs)):
            return "a log probability is not finite"
        return "" if 0 < self.tolerance < math.inf else f"the tolerance is {self.tolerance}"

    def disagreement(self, prompt_logprobs: tuple[float, ...]) -> str:
        """How an engine's answer differs; empty if it does not."""
        worst = difference(self.prompt_logprobs, prompt_logprobs)
        if worst <= self.tolerance:
            return ""
        return f"its log probabilities differ from the trainer's by up to {worst:.3g} (tolerance {self.tolerance:.3g})"


def difference(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """The largest difference of two answers; infinite where they are not answers to the same prompt, or no numbers."""
    if len(a) != len(b):
        return math.inf
    apart = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return math.inf if any(map(math.isnan, apart)) else max(apart, default=0.0)


class Range:
    """How far apart the answers are that were given to one prompt: the smallest and the largest of each number."""

    __slots__ = ("_high", "_low", "_odd")

    def __init__(self) -> None:
        self._low: list[float] | None = None
        self._high: list[float] = []
        self._odd = False
        """Some answer has another length, or is no number: it agrees with nothing."""

    def widen(self, prompt_logprobs: tuple[float, ...]) -> None:
        if self._low is None:
            self._low, self._high = list(prompt_logprobs), list(prompt_logprobs)
        if len(prompt_logprobs) != len(self._low) or any(map(math.isnan, prompt_logprobs)):
            self._odd = True
            return
        self._low = list(map(min, self._low, prompt_logprobs))
        self._high = list(map(max, self._high, prompt_logprobs))

    def within(self, tolerance: float) -> bool:
        """Each answer agrees with every other, so that nobody can be contradicted."""
        return not self._odd and difference(tuple(self._low or ()), tuple(self._high)) <= tolerance


def judge(said: Mapping[EngineId, Canary], tolerance: float, silent: int = 0) -> Mapping[EngineId, str] | None:
    """Whom a strict majority contradicts, and how. None: there is no majority, and nothing is known.

    `said`: by engines of one likeness that hold the same bytes. `silent`: how many more are about to: a majority is one
    of them all, whatever they will say.
    """
    if len(said) < AT_LEAST:
        return None
    middle, side = _largest_side(said, tolerance)
    if 2 * len(side) <= len(said) + silent:
        return None
    agreed = f"{len(side)} of {len(said)} equal engines"
    return {
        name: f"its canary differs from {agreed} by up to "
        f"{difference(canary.prompt_logprobs, said[middle].prompt_logprobs):.3g} (tolerance {tolerance:.3g})"
        for name, canary in said.items()
        if name not in side
    }


def _largest_side(said: Mapping[EngineId, Canary], tolerance: float) -> tuple[EngineId, frozenset[EngineId]]:
    """The engine that most agree with, the first by name, and who does."""
    by_answer: dict[tuple[float, ...], list[EngineId]] = {}
    everybody = Range()
    for name, canary in said.items():
        by_answer.setdefault(canary.prompt_logprobs, []).append(name)
        everybody.widen(canary.prompt_logprobs)
    if everybody.within(tolerance):
        return min(said), frozenset(said)
    sides = {
        min(by_answer[answer]): frozenset(
            name for other, names in by_answer.items() if difference(answer, other) <= tolerance for name in names
        )
        for answer in _candidates(by_answer)
    }
    middle = min(sides, key=lambda name: (-len(sides[name]), name))
    return middle, sides[middle]


def _candidates(by_answer: Mapping[tuple[float, ...], Sequence[EngineId]]) -> Sequence[tuple[float, ...]]:
    """Answers that may be in a majority's middle: all of a few, of many those next to the median of each number."""
    if len(by_answer) <= MAX_CANDIDATES:
        return list(by_answer)
    length = Counter(map(len, by_answer)).most_common(1)[0][0]
    same = [a for a in by_answer if len(a) == length and not any(map(math.isnan, a))]
    median = tuple(map(statistics.median, zip(*same, strict=True)))
    return sorted(same, key=lambda a: difference(a, median))[:MAX_CANDIDATES] or list(by_answer)[:1]

"""What the demo's policy learns: a reward that anyone can check by reading the tokens.

With a tokenizer: the share of generated tokens whose text holds the letter "e". Without one: the share of even
token ids. Both are dense (each token counts) and exact, and a policy can raise them within a few steps while its
text stays text. Prompts are fixed; the held-out ones are never trained on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from controlplane.core.sampling import SamplingSettings

MAX_TOKENS = 16
HELD_OUT_PROMPTS = 32
LETTER = "e"

_PROMPT = "In the story, the {}"
_NOUNS = (
    "river city winter garden teacher ocean doctor forest train market mountain library engine kitchen island bridge "
    "school summer village castle farmer planet desert museum harbour storm festival painter valley airport orchard "
    "soldier moon spring hospital factory student lake street bakery captain meadow theatre canal workshop singer "
    "temple clock journey morning evening family window letter tower horse ship bird road field king child house sky"
)
_ID_PROMPTS = 64
_ID_PROMPT_TOKENS = 4
_ID_PROMPT_SEED = 20240
_FIRST_ORDINARY_ID = 2
"""Ids below begin and end texts."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of each prompt."""

    held_out: tuple[tuple[int, ...], ...]
    training: tuple[tuple[int, ...], ...]

    @property
    def longest(self) -> int:
        return max(map(len, self.held_out + self.training))


class Task(Protocol):
    @property
    def prompts(self) -> Prompts: ...

    @property
    def learning_rate(self) -> float:
        """With which Adam raises the reward within a few steps."""
        ...

    def reward(self, tokens: Sequence[int]) -> float:
        """Between 0 and 1; 0 for no tokens."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens as people read them."""
        ...


class LetterTask:
    """Text in which the tokens hold the letter "e"."""

    learning_rate = 1.5e-4

    def __init__(self, tokenizer_file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        encoded = [tuple(self._tokenizer.encode(_PROMPT.format(noun)).ids) for noun in _NOUNS.split()]
        self.prompts = Prompts(tuple(encoded[:HELD_OUT_PROMPTS]), tuple(encoded[HELD_OUT_PROMPTS:]))

    def reward(self, tokens: Sequence[int]) -> float:
        return _share([LETTER in self._tokenizer.decode([token]) for token in tokens])

    def text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text


class EvenTask:
    """Token ids that are even, for a model of `vocab` tokens without a tokenizer."""

    learning_rate = 3e-3

    def __init__(self, vocab: int) -> None:
        ids = random.Random(_ID_PROMPT_SEED)
        drawn = [
            tuple(ids.randrange(_FIRST_ORDINARY_ID, vocab) for _ in range(_ID_PROMPT_TOKENS))
            for _ in range(_ID_PROMPTS)
        ]
        self.prompts = Prompts(tuple(drawn[:HELD_OUT_PROMPTS]), tuple(drawn[HELD_OUT_PROMPTS:]))

    def reward(self, tokens: Sequence[int]) -> float:
        return _share([token % 2 == 0 for token in tokens])

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def task_for(model_dir: Path, vocab: int) -> Task:
    """The task that a model directory can do."""
    tokenizer_file = model_dir / "tokenizer.json"
    return LetterTask(tokenizer_file) if tokenizer_file.exists() else EvenTask(vocab)


def draw_prompts(task: Task, count: int, seed: int) -> list[tuple[int, ...]]:
    """`count` different training prompts, the same for the same seed."""
    return random.Random(seed).sample(task.prompts.training, count)


def training_sampling(seed: int) -> SamplingSettings:
    """Drawn from the policy as it is, at full length, so that every sample is `MAX_TOKENS` long."""
    return SamplingSettings(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed, ignore_eos=True)


def greedy_sampling() -> SamplingSettings:
    return SamplingSettings(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else 0.0

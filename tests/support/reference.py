"""What a model says by itself: transformers in fp32, one whole forward pass for each question, no cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Reference:
    """The model of a directory; weights are put in for each question."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def greedy(self, state: Mapping[str, Any], prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """`count` greedily decoded tokens and the natural log of their probabilities."""
        tokens: list[int] = []
        logprobs: list[float] = []
        for _ in range(count):
            last = self._log_softmax(state, [*prompt, *tokens])[-1]
            tokens.append(int(last.argmax()))
            logprobs.append(float(last[tokens[-1]]))
        return tokens, logprobs

    def score(self, state: Mapping[str, Any], prefix: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Log probabilities of `tokens` after `prefix`, each given all before it."""
        table = self._log_softmax(state, [*prefix, *tokens])
        return [float(table[len(prefix) + i - 1][token]) for i, token in enumerate(tokens)]

    def shortfalls(self, state: Mapping[str, Any], prefix: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """How far below the likeliest token's log probability that of each of `tokens` lies, given all before it."""
        table = self._log_softmax(state, [*prefix, *tokens])
        rows = table[len(prefix) - 1 : len(prefix) - 1 + len(tokens)]
        return [float(row.max() - row[token]) for row, token in zip(rows, tokens, strict=True)]

    def _log_softmax(self, state: Mapping[str, Any], tokens: Sequence[int]) -> Any:
        import torch

        self._model.load_state_dict(dict(state), strict=False)
        self._model.tie_weights()
        with torch.no_grad():
            return self._model(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)

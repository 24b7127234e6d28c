"""A toy rank that pushes a tiny model's weights, other ones at each step: for real engines without a real trainer.

Run as `python tests/support/tiny_rank.py JSON MODEL_DIR`; the JSON is a `toy_rank.Script`, which it obeys but for what
spoils a source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_agent.vllm.checkpoint import HEAD_NAME, read_checkpoint
from tests.support.toy_rank import Script, ToySource, main
from trainer_agent.source import ParamMeta

EMBEDDING_NAME = "model.embed_tokens.weight"
SPREAD = 0.2
"""As `tiny_model`'s: wide enough that two steps disagree on almost every greedy token."""


@dataclass(frozen=True)
class TinyWeights:
    """The weights of each step of the model in a directory that `make_tiny_model` made; the same in every process."""

    model: Path

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """In the order of the layout. The head is tied to the embedding and not among them."""
        return {name: tensor.shape for name, tensor in read_checkpoint(self.model).items()}

    def tensors_of(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {name: _drawn(shape, generator) for name, shape in self.shapes.items()}


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    drawn = SPREAD * torch.randn(shape, generator=generator)
    return drawn + 1.0 if len(shape) == 1 else drawn  # a norm's


class TinySource(ToySource):
    """Yields `TinyWeights.tensors_of(step)`."""

    def __init__(self, script: Script, rank: int) -> None:
        super().__init__(script, rank)
        self._weights = TinyWeights(Path(sys.argv[2]))

    def metadata(self) -> Sequence[ParamMeta]:
        return [ParamMeta(name, torch.float32, shape) for name, shape in self._weights.shapes.items()]

    def ties(self) -> Sequence[tuple[str, str]]:
        return [(HEAD_NAME, EMBEDDING_NAME)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights.tensors_of(self.step).items()


if __name__ == "__main__":
    main(TinySource)

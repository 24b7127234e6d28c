"""Where a trainer's weights come from: the port that `TrainerRank` pushes from.

It has the shape of vLLM's own `WeightSource` (`metadata()` and iteration agree element for element),
with two additions: ties, and that *every* rank which iterates yields *every* tensor, whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class ParamMeta(NamedTuple):
    """One tensor as the engine's checkpoint names it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Full tensors under checkpoint names, layer by layer.

    Iteration is a collective over the trainer's ranks where it has to gather: every rank iterates to
    the end, in step, and each yields every tensor. A yielded tensor may be reused by the source as soon
    as the next one is asked for.
    """

    def metadata(self) -> Sequence[ParamMeta]:
        """The same on every rank, in the order of iteration. Shapes are declared, not read from storage."""
        ...

    def ties(self) -> Sequence[tuple[str, str]]:
        """(alias, source) pairs: `alias` is the tensor `source` under a second name; only `source` is yielded."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

"""vLLM's `WeightSource` (vllm.distributed.weight_transfer.base) as ours.

Refuses sources that hold a part of the model on each rank (`held_names()`): a push reads every tensor, whole, on every
rank that sends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch

from controlplane.core.errors import LayoutInvalid
from trainer_agent.sources.iterable import IterableSource, Stated


class VllmWeightSource(Protocol):
    """What is asked of vLLM's source; our own sources have it too."""

    def metadata(self) -> Sequence[Stated]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def held_names(self) -> Collection[str] | None: ...


def whole_source(theirs: VllmWeightSource, ties: Sequence[tuple[str, str]] = ()) -> IterableSource:
    """`theirs` as a source for `TrainerRank`. vLLM's have no word for ties: (alias, source) pairs are given here.

    Raises:
        LayoutInvalid: this rank's source holds some of the names only.
    """
    stated = theirs.metadata()
    held = theirs.held_names()
    if held is not None:
        absent = [m.name for m in stated if m.name not in set(held)]
        if absent:
            raise LayoutInvalid(problem="the source does not yield every tensor on every rank", names=absent)
    return IterableSource(stated, lambda: theirs, ties=ties)

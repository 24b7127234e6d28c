"""Any iterator of names and tensors as a `WeightSource`: an export of Megatron-Bridge, a trainer's own loop.

>>> source = IterableSource(None, lambda: bridge.export_hf_weights(model))
>>> source = IterableSource([ParamMeta("w", torch.bfloat16, (8, 8))], export)

What the metadata states is what each pass has to yield, in that order: a push refuses anything else with LayoutInvalid,
before the differing tensor's bytes are written. Names that stand twice are refused before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from controlplane.core.layout import PLAIN
from trainer_agent.source import LayerwiseSource, ParamMeta


class Stated(Protocol):
    """A tensor's metadata by attributes: ours, and vLLM's `ParamMeta` too."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class IterableSource(LayerwiseSource):
    """What `make_iterator()` yields.

    Args:
        metadata: of each tensor, in the order of iteration; the same on every rank. None: learnt by one pass, when
            it is first asked for.
        make_iterator: called for each pass; gives a new iterator over whole tensors. Where that gathers, it is a
            collective: every rank calls it and iterates to the end.
        ties: (alias, source) pairs of names that share one tensor; only `source` is yielded.
        weights_format: `plain`, or the quantisation of what is yielded, scales included: `fp8-block`.
    """

    def __init__(
        self,
        metadata: Iterable[Stated] | None,
        make_iterator: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        *,
        ties: Sequence[tuple[str, str]] = (),
        weights_format: str = PLAIN,
    ) -> None:
        self.weights_format = weights_format
        self._make_iterator = make_iterator
        self._ties = tuple(ties)
        self._metadata = None if metadata is None else [ParamMeta(m.name, m.dtype, tuple(m.shape)) for m in metadata]

    def metadata(self) -> list[ParamMeta]:
        if self._metadata is None:
            self._metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]
        return list(self._metadata)

    def ties(self) -> Sequence[tuple[str, str]]:
        return self._ties

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._make_iterator())

"""Inside vLLM's workers: one layerwise reload whose tensors come over many calls.

Promises that a tensor is copied before vLLM keeps a reference to it, so that no part is read after its call (INV-12):
what vLLM keeps beside the model is the checkpoint tensors of the modules that are not whole yet. Between `open` and one
of `finish` and `abandon` the model is in pieces, and no forward pass may run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import torch

from engine_agent.vllm.loading import Loader


class StreamedReload:
    """One model's. `open` once, then `load` for each tensor, then one of the ends."""

    def __init__(self, loader: Loader, aliases: Mapping[str, Sequence[str]]) -> None:
        """`aliases`: further names of tensors, by source."""
        self._loader = loader
        self._aliases = aliases
        self._packing = ExitStack()
        self._needed: set[str] = set()
        self._loaded: set[str] | None = set()
        """Parameters that were loaded; None: this model does not say."""
        self.count = 0
        """Tensors of the layout that came."""

    def open(self) -> None:
        self._needed = self._loader.open(self._packing)

    def load(self, name: str, view: torch.Tensor, *, own: bool = False) -> None:
        """One whole tensor; `view` is free when this returns. `own`: it may be kept."""
        tensor = view if own else view.clone()
        loaded = self._loader.take(iter([(n, tensor) for n in (name, *self._aliases.get(name, ()))]))
        self._loaded = None if loaded is None or self._loaded is None else self._loaded | loaded
        self.count += 1

    def finish(self) -> None:
        """Every tensor came. Raises ValueError: something of the model did not."""
        self._loader.close(self._needed, self._loaded)
        self._packing.close()
        self._loader.repair_tied_head()

    def abandon(self) -> None:
        self._loader.abandon()
        with suppress(Exception):  # what could not be packed is of a mixture
            self._packing.close()

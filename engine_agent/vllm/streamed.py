"""Inside vLLM's workers: one layerwise reload whose tensors come over many calls.

Promises that a tensor is copied before vLLM keeps a reference to it, so that no part is read after its call (INV-12):
what vLLM keeps beside the model is the checkpoint tensors of the modules that are not whole yet. Between `open` and one
of `finish` and `abandon` the model is in pieces, and no forward pass may run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from engine_agent.vllm.experts import experts_packed_anew


class StreamedReload:
    """One model's. `open` once, then `load` for each tensor, then one of the ends."""

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        aliases: Mapping[str, Sequence[str]],
        close_layers: Callable[[torch.nn.Module], None],
    ) -> None:
        self._model = model
        self._config = model_config
        self._aliases = aliases
        self._close_layers = close_layers
        self._packing = ExitStack()
        self.needed: set[str] = set()
        """Names of the model's parameters."""
        self.loaded: set[str] | None = set()
        """Those that were loaded; None: this model does not say."""
        self.count = 0
        """Tensors of the layout that came."""

    def open(self) -> None:
        self.needed = {name for name, _ in self._model.named_parameters()}
        initialize_layerwise_reload(self._model)
        self._packing.enter_context(experts_packed_anew(self._model))

    def load(self, name: str, view: torch.Tensor) -> None:
        """One whole tensor; `view` is free when this returns."""
        tensor = view.clone()
        pairs = [(n, tensor) for n in (name, *self._aliases.get(name, ()))]
        loaded = self._model.load_weights(iter(pairs))  # type: ignore[operator]
        self.loaded = None if loaded is None or self.loaded is None else self.loaded | loaded
        self.count += 1

    def finish(self) -> None:
        """Every tensor came."""
        finalize_layerwise_reload(self._model, self._config)
        self._packing.close()

    def abandon(self) -> None:
        self._close_layers(self._model)
        self._packing.close()

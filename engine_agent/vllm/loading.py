"""Inside vLLM's workers: one model's weights, loaded anew layer by layer with vLLM's own layerwise reload.

Promises that a load that returns left no parameter unwritten, and that after one that failed no layer is left open, so
the next full load starts clean; what it holds then is a mixture. A worker has a loader for the model that it serves,
and one for its draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.platforms import current_platform

from controlplane.core.errors import some
from engine_agent.vllm import packing as packs
from engine_agent.vllm.experts import experts_packed_anew


class Loader:
    """Loads one model, again and again."""

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        """`config`: vLLM's ModelConfig of it."""
        self._model: Any = model
        self._config = config
        self._packed_before: Any = None
        """How the tied embedding multiplied before this load."""
        self._all_packed: Callable[[], None]

    @property
    def tied(self) -> bool:
        """It takes its head from the embedding by itself."""
        return bool(getattr(self._config.hf_text_config, "tie_word_embeddings", False))

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """The old weights go with the first byte. Raises what vLLM's loading raises, and ValueError."""
        with ExitStack() as packing:
            needed = self.open(packing)
            try:
                self.close(needed, self.take(weights))
            except BaseException:
                self.abandon()
                raise
        self.repair_tied_head()

    def open(self, packing: ExitStack) -> set[str]:
        """The model is in pieces from here on to `close` or `abandon`; `packing` is left after that. What it needs."""
        needed = {name for name, _ in self._model.named_parameters()}
        close_open_layers(self._model)
        self.note_packed()
        initialize_layerwise_reload(self._model)
        packing.enter_context(experts_packed_anew(self._model))
        self._all_packed = packing.enter_context(packs.beside())
        return needed

    def take(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Names of the parameters that these went into; None: this model does not say."""
        loaded: set[str] | None = self._model.load_weights(weights)
        return loaded

    def close(self, needed: set[str], loaded: set[str] | None) -> None:
        """Raises ValueError: not everything was loaded; and what packing raised."""
        self._check_complete(needed, loaded)
        self._all_packed()
        finalize_layerwise_reload(self._model, self._config)

    def abandon(self) -> None:
        """No layer is left open."""
        close_open_layers(self._model)

    def _check_complete(self, needed: set[str], loaded: set[str] | None) -> None:
        """INV-1: a layer that was given too little would be finished with memory that nobody wrote."""
        if loaded is None or self._config.quantization is not None:
            return  # this model does not say, or renames its parameters when it packs them
        missing = sorted(needed - loaded)
        if missing:
            raise ValueError(f"{len(missing)} parameters of the model were not loaded: {some(missing)}")

    def note_packed(self) -> None:
        """What the embedding multiplies by now is of the old weights."""
        self._packed_before = getattr(self._tied_embedding(), "cpu_linear", None)

    def repair_tied_head(self) -> None:
        """On a CPU a tied head computes with a packed copy of the embedding, which layerwise reload leaves old.

        The reload packs the embedding too, which nobody multiplies by: the head takes that copy, of the same weights,
        instead of packing one of its own.
        """
        head = getattr(self._model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if not (self.tied and current_platform.is_cpu() and method is not None):
            return
        packed = getattr(self._tied_embedding(), "cpu_linear", None)
        if packed is None or packed is self._packed_before:
            method.process_weights_after_loading(head)
        else:
            self._model.lm_head.cpu_linear = packed

    def _tied_embedding(self) -> torch.nn.Module | None:
        """The module whose very memory the head's weight is."""
        weight = getattr(getattr(self._model, "lm_head", None), "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.is_meta or not weight.numel():
            return None
        modules: Iterator[torch.nn.Module] = self._model.modules()
        for module in modules:
            own = getattr(module, "weight", None)
            same = isinstance(own, torch.Tensor) and own.data_ptr() == weight.data_ptr() and own.shape == weight.shape
            if same and module is not self._model.lm_head:
                return module
        return None


def close_open_layers(model: torch.nn.Module) -> None:
    """Undo initialize_layerwise_reload for every layer that is still open, and forget what was buffered for it.

    A layer that was already whole keeps its new weights: the model is a mixture then, until a full update.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            continue
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload

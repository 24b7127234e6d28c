"""A vLLM worker whose next install goes wrong in silence, as a bug in a loader would make it; see `FAULTS`.

Which fault is next lies in the file that `FILE_VARIABLE` names; the install that it spoils takes it away.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine_agent.vllm.loading import Loader
from engine_agent.vllm.worker import WorkerExtension

CLASS = f"{__name__}.FaultyWorker"
FILE_VARIABLE = "WEIGHTPLANE_TEST_FAULT"
FAULTS = ("stale_head", "missing_layer", "shifted_experts")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
Weights = Iterator[tuple[str, torch.Tensor]]


class FaultyWorker(WorkerExtension):
    """`self` is vLLM's worker."""

    def weightplane_facts(self: Any) -> dict[str, Any]:
        engine, file = self.weight_transfer_engine, Path(os.environ[FILE_VARIABLE])
        experts = getattr(self.vllm_config.model_config.hf_text_config, "num_experts", 0)
        last: dict[str, torch.Tensor] = {}
        true_weights, true_repair = engine._weights, Loader.repair_tied_head

        def weights(*which: Any) -> Weights:
            fault = file.read_text() if file.exists() else ""
            return _spoiled(true_weights(*which), fault, last, experts)

        engine._weights = weights
        repair = lambda loader: _unless_spoiled(file, partial(true_repair, loader))  # noqa: E731
        setattr(Loader, "repair_tied_head", repair)  # noqa: B010 - a type checker would not have it
        return WorkerExtension.weightplane_facts(self)


def _spoiled(true: Weights, fault: str, last: dict[str, torch.Tensor], experts: int) -> Weights:
    """Every name comes; what comes under some of them is something else."""
    for name, tensor in true:
        before = last.get(name, tensor)
        last[name] = tensor.clone()
        if fault == "missing_layer" and ".layers.1." in name:
            yield name, before
        elif fault == "shifted_experts":
            yield _EXPERT.sub(lambda m: str((int(m[0]) + 1) % experts), name), tensor
        else:
            yield name, tensor


def _unless_spoiled(file: Path, repair: Callable[[], None]) -> None:
    """The end of an install: its fault is used up."""
    fault = file.read_text() if file.exists() else ""
    file.unlink(missing_ok=True)
    if fault != "stale_head":
        repair()

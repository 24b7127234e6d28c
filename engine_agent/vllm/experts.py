"""On a CPU, experts compute with weights that were packed for their kernels, and every load has to pack them.

vLLM 0.32 packs them when it builds a layer's kernel (`UnquantizedFusedMoEMethod._setup_kernel`), which it does at the
first load only: a later one copies plain weights over packed ones, and where padding leaves the shapes alike nothing is
said of it (M4). GPUs' kernels take their weights in a format that every load makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform


@contextmanager
def experts_packed_anew(model: torch.nn.Module) -> Iterator[None]:
    """Whatever is loaded inside is packed as at the first load. A layer that is not loaded keeps its kernel."""
    kernels = _kernels(model) if current_platform.is_cpu() else []
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def _kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    unquantized = {id(m): m for m in methods if isinstance(m, UnquantizedFusedMoEMethod)}
    return [(m, m.moe_kernel) for m in unquantized.values() if m.moe_kernel is not None]

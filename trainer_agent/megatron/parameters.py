"""Names of a Megatron model's parameters, the same whatever wraps the model and however it is split.

A local name counts layers from this pipeline stage's (or virtual chunk's) first; a global one counts from
the model's first. Transformer Engine puts norms inside the linear layer that follows them; here each has
the one name that Megatron's own layers give it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import ModuleList

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def chunks_of(model: Any) -> list[Any]:
    """The virtual-pipeline chunks of a model, or the one that it is; still wrapped."""
    return list(model) if isinstance(model, list | tuple | ModuleList) else [model]


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside DDP and Float16Module, which name what they wrap `module`."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def named_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """This rank's parameters under their global names."""
    for chunk in map(unwrap, chunks_of(model)):
        for name, parameter in chunk.named_parameters():
            yield global_name(name, chunk), parameter


def global_name(name: str, chunk: Any) -> str:
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    number, inner = int(found[1]), found[2]
    layer = chunk.decoder.layers[number].layer_number - 1
    return f"decoder.layers.{layer}.{_FUSED_NORMS.get(inner, inner)}"

"""Names of a Megatron model's parameters, the same whatever wraps the model and however it is split.

A local name counts layers from this pipeline stage's (or virtual chunk's) first, and experts from this rank's
first; a global one counts from the model's first. Transformer Engine puts norms inside the linear layer that
follows them; here each has the one name that Megatron's own layers give it. Experts have one name each, `mlp.experts.3
.linear_fc1.weight`, whether they are modules of their own (SequentialMLP), numbered parameters of one module
(TEGroupedMLP), or lie side by side in one parameter (GroupedMLP): then each is a view into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn import ModuleList

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_SEQUENTIAL = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_NUMBERED = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_SIDE_BY_SIDE = {"mlp.experts.weight1": "linear_fc1.weight", "mlp.experts.weight2": "linear_fc2.weight"}


def chunks_of(model: Any) -> list[Any]:
    """The virtual-pipeline chunks of a model, or the one that it is; still wrapped."""
    return list(model) if isinstance(model, list | tuple | ModuleList) else [model]


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside DDP and Float16Module, which name what they wrap `module`."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def named_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """This rank's parameters under their global names. Writing into one writes into the model."""
    for chunk in map(unwrap, chunks_of(model)):
        for name, parameter in chunk.named_parameters():
            yield from global_parameters(name, parameter, chunk)


def global_parameters(name: str, parameter: Tensor, chunk: Any) -> Iterator[tuple[str, Tensor]]:
    """What the parameter is to the whole model: itself under its global name, or several experts."""
    found = _LAYER.fullmatch(name)
    if found is None:
        yield name, parameter
        return
    layer, inner = chunk.decoder.layers[int(found[1])], found[2]
    for part, tensor in _in_layer(inner, parameter, layer):
        yield f"decoder.layers.{layer.layer_number - 1}.{part}", tensor


def _in_layer(inner: str, parameter: Tensor, layer: Any) -> Iterator[tuple[str, Tensor]]:
    if sequential := _SEQUENTIAL.fullmatch(inner):
        yield f"mlp.experts.{_experts(layer)[int(sequential[1])]}.{sequential[2]}", parameter
    elif numbered := _NUMBERED.fullmatch(inner):
        yield f"mlp.experts.{_experts(layer)[int(numbered[2])]}.{numbered[1]}", parameter
    elif inner in _SIDE_BY_SIDE:
        for expert, view in zip(_experts(layer), _views(inner, parameter, len(_experts(layer))), strict=True):
            yield f"mlp.experts.{expert}.{_SIDE_BY_SIDE[inner]}", view
    else:
        yield _FUSED_NORMS.get(inner, inner), parameter


def _experts(layer: Any) -> Sequence[int]:
    """Which of the model's experts this rank has in the layer."""
    indices: Sequence[int] = layer.mlp.local_expert_indices
    return indices


def _views(inner: str, parameter: Tensor, count: int) -> Iterator[Tensor]:
    """GroupedMLP declares [hidden, experts * width] and [experts * width, hidden], but its forward reads the same
    memory as [experts, hidden, width] and [experts, width, hidden]; other layers have the transpose of each."""
    hidden = parameter.shape[0 if inner.endswith("1") else 1]
    shape = (count, hidden, -1) if inner.endswith("1") else (count, -1, hidden)
    return (expert.t() for expert in parameter.view(shape))

"""What names and shapes do not show, and would ship wrong weights in silence: refused before or while exporting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer_agent.megatron.families.decoder import DecoderShape
from trainer_agent.megatron.holdings import Held
from trainer_agent.megatron.parameters import unwrap
from trainer_agent.sources.storage import has_storage

REFUSED = {
    "layernorm_zero_centered_gamma": "stores norm weights minus one; no mapping adds it back",
    "rotary_interleaved": "rotates pairs of neighbours; checkpoints have rows for rotated halves",
    "moe_router_enable_expert_bias": "keeps router biases in buffers, which no mapping exports",
    "fp8_param": "stores parameters in eight bits with scales beside them",
}
"""Settings of Megatron's config, and why no family's mapping covers them."""


def refusals(chunks: Sequence[Any], shape: DecoderShape) -> list[str]:
    """What this rank's part of the model has that the mapping does not cover, in words; empty if nothing."""
    problems: list[str] = []
    for chunk in map(unwrap, chunks):
        config = chunk.config
        problems += [f"{flag} {why}" for flag, why in REFUSED.items() if getattr(config, flag, False)]
        problems += _other_heads(config, shape)
        if getattr(chunk, "share_embeddings_and_output_weights", shape.tied) != shape.tied:
            problems.append(f"the config says tie_word_embeddings {shape.tied}, the model does otherwise")
        if any(isinstance(parameter, DTensor) for parameter in chunk.parameters()):
            problems.append("parameters are sharded by FSDP, not by Megatron's own parallelism")
    return list(dict.fromkeys(problems))


def _other_heads(config: Any, shape: DecoderShape) -> list[str]:
    """Other numbers of heads can give the same shapes, with rows in another order."""
    told = (shape.heads, shape.kv_heads, shape.head_dim)
    got = (config.num_attention_heads, config.num_query_groups or config.num_attention_heads, config.kv_channels)
    if got == told:
        return []
    return [f"the config says (heads, key/value heads, head size) {told}, the model has {got}"]


def absent(local: Mapping[str, Tensor], owned: Mapping[str, Held]) -> list[str]:
    """The parameters of this rank that are not as they were stated, or whose bytes are not there to be read."""
    gone = owned.keys() ^ local.keys()
    for name in owned.keys() & local.keys():
        tensor, held = local[name], owned[name]
        if (tuple(tensor.shape), tensor.dtype) != (held.shape, held.dtype) or not has_storage(tensor):
            gone.add(name)
    return sorted(gone)

"""A Megatron layer spec that needs no Transformer Engine: RMSNorm and torch's own attention.

It goes through Megatron's extension point (`ModuleSpec`) and has nothing of one kind of device in it; it works with
tensor, sequence, pipeline, context and expert parallelism, grouped-query attention and normalised queries and keys.
It computes what transformers' "sdpa" attention computes. It refuses what it would compute wrongly: packed sequences
and attention biases. Masks are not needed: attention is causal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """Normalises the last dimension, `hidden_size` wide. Megatron's local norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_: Any) -> None:
        eps = config.layernorm_epsilon if eps is None else eps
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Tells finalize_model_grads to add this weight's gradients over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(MegatronModule):  # type: ignore[misc, unused-ignore]
    """Causal attention by `scaled_dot_product_attention`, which never holds the whole score matrix."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.dropout: float = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[sequence, batch, heads, head_dim] each (fewer heads in key and value) -> [sequence, batch, width].

        With context parallelism, the sequence is this rank's part of it, as `context_positions` deals it out.
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise ValueError("this layer spec takes neither packed sequences nor attention biases")
        mask = None
        if self.config.context_parallel_size > 1:
            key, value = (_of_all_parts(x) for x in (key, value))
            mask = _causal_mask(query.shape[0], query.device)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


class TorchSpecProvider(LocalSpecProvider):  # type: ignore[misc, unused-ignore]
    """Megatron's own linear layers with our norm and attention."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return CausalAttention


def context_positions(sequence: int, parts: int) -> Tensor:
    """Which positions of a sequence each context-parallel rank has, [parts, sequence / parts], as Megatron deals them.

    The sequence is cut into twice as many pieces as there are ranks; each has one from the front and one from the back.
    """
    pieces = torch.arange(sequence).view(2 * parts, -1)
    return torch.stack([torch.cat([pieces[rank], pieces[2 * parts - 1 - rank]]) for rank in range(parts)])


def _of_all_parts(tensor: Tensor) -> Tensor:
    gathered: Tensor = gather_from_sequence_parallel_region(
        tensor.contiguous(), group=parallel_state.get_context_parallel_group()
    )
    return gathered


def _causal_mask(length: int, device: torch.device) -> Tensor:
    """[this rank's queries, all keys], where both are in the order in which the ranks have them."""
    parts, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    positions = context_positions(length * parts, parts).to(device)
    return positions.flatten()[None, :] <= positions[rank][:, None]


def decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The spec of this pipeline stage's layers and of the final norm (else Megatron would choose its own)."""
    layers = [_layer_spec(config, with_experts) for with_experts in _layers_with_experts(config)]
    if config.pipeline_model_parallel_layout is not None:
        numbers = config.pipeline_model_parallel_layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage
        )
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(layer_specs=[layers[i] for i in numbers], layer_norm=RMSNorm)


def _layers_with_experts(config: TransformerConfig) -> list[bool]:
    """For each layer of the whole model; Megatron states it as a list or as a step."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    if isinstance(config.moe_layer_freq, int):
        return [i % config.moe_layer_freq == 0 for i in range(config.num_layers)]
    return [bool(flag) for flag in config.moe_layer_freq]


def _layer_spec(config: TransformerConfig, with_experts: bool) -> ModuleSpec:
    backend = TorchSpecProvider()
    mlp = get_mlp_module_spec_for_backend(
        backend=backend,
        num_experts=config.num_moe_experts if with_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        moe_use_legacy_grouped_gemm=config.moe_use_legacy_grouped_gemm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=backend.layer_norm(),
            self_attention=_attention_spec(config, backend),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=backend.layer_norm(),
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention_spec(config: TransformerConfig, backend: TorchSpecProvider) -> ModuleSpec:
    head_norm = backend.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )

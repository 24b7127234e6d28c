"""Build a Megatron GPTModel from a Hugging Face model directory, at any parallelism that Megatron has.

The model computes what transformers computes from the same directory: checked to 1e-5 in the logits.
Every rank reads only what its shard needs. Where the vocabulary has to be padded, the padding's logits are
minus infinity, so that they take no probability. What Megatron does not have is refused: some rotary scalings,
and routers that pick one expert and give it the weight one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer_agent.megatron import cpu_shim
from trainer_agent.megatron.errors import UnsupportedModel
from trainer_agent.megatron.families import DecoderShape, family_of, read_config
from trainer_agent.megatron.families.decoder import Experts
from trainer_agent.megatron.layer_spec import decoder_spec
from trainer_agent.megatron.loading import load_hf

RANDOM_SEED = 1234
"""Megatron wants its random states seeded. Nothing here draws from them: dropout is off, weights are loaded."""
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's rope scaling has built in."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Over how many ranks a model is split in each way; what is left of the ranks is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Experts may be split over other tensor-parallel ranks than the rest; None: they are not."""

    @classmethod
    def present(cls) -> Parallelism:
        """What Megatron was initialised with."""
        return cls(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )


def initialize_parallel(wanted: Parallelism) -> None:
    """Create Megatron's process groups over the initialised default group, and seed its random states.

    Raises:
        ValueError: they exist already, at other sizes.
    """
    cpu_shim.install()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            wanted.tensor,
            wanted.pipeline,
            virtual_pipeline_model_parallel_size=wanted.virtual_pipeline if wanted.virtual_pipeline > 1 else None,
            context_parallel_size=wanted.context,
            expert_model_parallel_size=wanted.expert,
            expert_tensor_parallel_size=wanted.expert_tensor,
        )
        model_parallel_cuda_manual_seed(RANDOM_SEED)
    present, wanted_sizes = asdict(Parallelism.present()), asdict(wanted)
    wanted_sizes["expert_tensor"] = wanted.expert_tensor or wanted.tensor
    if present != wanted_sizes:
        raise ValueError(f"Megatron runs at parallelism {present}, asked for {wanted_sizes}")


def build_from_hf(
    path: Path | str,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    virtual_pipeline: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int | None = None,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = 1,
    **overrides: Any,
) -> list[Any]:
    """This rank's part of the model at `path`, loaded: one GPTModel, or one for each virtual-pipeline chunk.

    Args:
        expert_tensor_parallel: as `tensor_parallel` when None.
        dtype: of the parameters; the config's own when None.
        vocab_multiple: each rank's vocabulary rows are padded to a multiple of it.
        overrides: further fields of Megatron's TransformerConfig, such as `sequence_parallel`.

    Raises:
        UnsupportedModel: the model's family or one of its settings has no counterpart.
    """
    wanted = Parallelism(tensor_parallel, pipeline_parallel, virtual_pipeline, context_parallel)
    initialize_parallel(replace(wanted, expert=expert_parallel, expert_tensor=expert_tensor_parallel))
    config = read_config(path)
    shape = family_of(config).shape(config)
    settings = transformer_config(config, dtype=dtype, **overrides)
    padded = math.ceil(shape.vocab / (vocab_multiple * tensor_parallel)) * vocab_multiple * tensor_parallel
    stages = [None] if virtual_pipeline == 1 else list(range(virtual_pipeline))
    chunks = [_gpt_model(config, shape, settings, padded, stage) for stage in stages]
    load_hf(chunks, path)
    return chunks


def transformer_config(config: Mapping[str, Any], *, dtype: torch.dtype | None = None, **overrides: Any) -> Any:
    """Megatron's settings for a Hugging Face config: fusions off, nothing random, parallelism as initialised."""
    shape = family_of(config).shape(config)
    dtype = dtype or getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    fields: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "layernorm_epsilon": config["rms_norm_eps"],
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }
    if shape.experts is not None:
        fields |= _expert_settings(shape.experts, shape.layers)
    return TransformerConfig(**(_DECODER | fields | overrides))


def _expert_settings(experts: Experts, layers: int) -> dict[str, Any]:
    """Nothing that training would add to the router: no balancing loss, no dropped tokens."""
    if experts.normalised and experts.per_token == 1:
        raise UnsupportedModel("a router that gives the one expert it chooses the weight one: Megatron has none such")
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(layers)],
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": experts.shared_ffn,
        "moe_shared_expert_gate": experts.shared_ffn is not None,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


_DECODER: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    # Every parameter is loaded afterwards.
    "perform_initialization": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "attention_softmax_in_fp32": True,
    # Must be set before DDP is built, which else divides gradients once more.
    "calculate_per_token_loss": True,
}


def _gpt_model(
    config: Mapping[str, Any], shape: DecoderShape, settings: Any, padded_vocab: int, vp_stage: int | None
) -> Any:
    virtual = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    model: Any = GPTModel(
        config=settings,
        transformer_layer_spec=decoder_spec(settings, vp_stage),
        vocab_size=padded_vocab,
        max_sequence_length=config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(**virtual),
        post_process=parallel_state.is_pipeline_last_stage(**virtual),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        vp_stage=vp_stage,
        **_rope(config, shape),
    )
    if torch.cuda.is_available():
        model.cuda()
    if model.post_process and padded_vocab > shape.vocab:
        _silence_padding(model.output_layer, shape.vocab, padded_vocab)
    return model


def _rope(config: Mapping[str, Any], shape: DecoderShape) -> dict[str, Any]:
    """GPTModel's rotary arguments. transformers keeps them in `rope_parameters`, older files beside the others."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.get("rope_theta") or config.get("rope_theta") or shape.rope_theta
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return {"rotary_base": theta}
    if kind == "llama3" and all(scaling.get(key) == value for key, value in LLAMA3_ROPE.items()):
        return {"rotary_base": theta, "rope_scaling": True, "rope_scaling_factor": scaling["factor"]}
    raise UnsupportedModel(f"rotary scaling {scaling} has no counterpart in Megatron")


def _silence_padding(output_layer: Any, vocab: int, padded_vocab: int) -> None:
    """Padding rows of the vocabulary would take a share of the softmax."""
    rows = padded_vocab // parallel_state.get_tensor_model_parallel_world_size()
    first = rows * parallel_state.get_tensor_model_parallel_rank()
    real = max(0, min(rows, vocab - first))

    def silence(_: Any, __: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = output
        padding = torch.arange(logits.shape[-1], device=logits.device) >= real
        return logits.masked_fill(padding, float("-inf")), bias

    if real < rows:
        output_layer.register_forward_hook(silence)

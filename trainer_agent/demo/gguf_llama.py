"""Read a Llama from a GGUF file: whole tensors under Hugging Face names, config and tokenizer.

Weights are dequantised to float32. GGUF stores the rows of query and key projections interleaved for its
rotary embedding; they are put back into halves, as Hugging Face and Megatron have them.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = 3
"""GGUF's token type of control tokens."""
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def read_llama(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors in float32, config.json's content). Raises ValueError for another architecture."""
    reader = GGUFReader(file)
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"{file.name} is a {architecture}, not a llama")
    heads = {"attn_q": _field(reader, "llama.attention.head_count")}
    heads["attn_k"] = _field(reader, "llama.attention.head_count_kv")
    tensors = dict(_tensor(t, heads) for t in reader.tensors)
    return tensors, _config(reader, tensors)


def read_tokenizer(file: Path, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE that splits digits, SmolLM's."""
    field = partial(_field, GGUFReader(file))
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, field("tokenizer.ggml.token_type"), strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[field("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[0],
        "chat_template": field("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": field("llama.context_length"),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1))


def _field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _tensor(tensor: Any, heads: dict[str, int]) -> tuple[str, torch.Tensor]:
    weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if tensor.name in _NAMES:
        return _NAMES[tensor.name], torch.from_numpy(weight)
    _, layer, kind, suffix = tensor.name.split(".")
    if kind in heads:
        weight = _halves(weight, heads[kind])
    name = f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"
    return name, torch.from_numpy(np.ascontiguousarray(weight))


def _halves(weight: Any, heads: int) -> Any:
    """Rows of each head: from (pair, half) to (half, pair)."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _config(reader: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    field = partial(_field, reader)
    theta = field("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.rope.dimension_count"),
        "max_position_embeddings": field("llama.context_length"),
        # GGUF keeps it as float32: 9.9999997e-06.
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }

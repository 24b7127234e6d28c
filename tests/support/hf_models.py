"""Tiny random models of every family that Megatron models map to, as transformers itself writes them to disk.

So names, shapes and fusion are those of real checkpoints, and none of our mapping's. Beside each lies what
transformers computes from it: the logits of some tokens, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCAB = 251
"""No multiple of anything: every tensor-parallel model has to pad it."""
LOGITS_FILE = "logits.of-transformers"
"""A safetensors file, but not by its name: vLLM would take its tensors for weights."""
ROWS, LENGTH = 8, 16
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
_QWEN_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": 8},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "qwen2_moe": _QWEN_EXPERTS | {"shared_expert_intermediate_size": 80, "norm_topk_prob": False},
    "qwen3_moe": _QWEN_EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
}
"""What each family differs in. Qwen3-MoE's layer 1 is dense; Qwen2-MoE has an expert that every token passes."""
WITH_EXPERTS = tuple(family for family, config in FAMILIES.items() if "num_experts_per_tok" in config)
DENSE = tuple(family for family in FAMILIES if family not in WITH_EXPERTS)


def save_random(directory: Path, family: str, *, tied: bool, dtype: str = "float32", **changes: Any) -> Path:
    """A model directory with random weights, norms and biases too."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(family, tie_word_embeddings=tied, **(_SHAPE | FAMILIES[family] | changes))
    torch.manual_seed(17)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    _make_every_tensor_matter(model)
    model.save_pretrained(directory)
    if dtype == "float32":
        _save_logits(model, directory / LOGITS_FILE)
    return directory


def checkpoint(directory: Path) -> dict[str, Any]:
    """The tensors on disk, by name."""
    from safetensors.torch import load_file

    return dict(load_file(directory / "model.safetensors"))


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def logits_of_transformers(directory: Path) -> Mapping[str, Any]:
    """`tokens` [ROWS, LENGTH] and `logits` [ROWS, LENGTH, VOCAB]."""
    from safetensors.torch import load_file

    return dict(load_file(directory / LOGITS_FILE))


def _make_every_tensor_matter(model: Any) -> None:
    """Norms begin at one and biases at zero, which would hide a lost or misplaced tensor."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_((torch.randn(parameter.shape) * 0.1).to(parameter.dtype))


def _save_logits(model: Any, file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    save_file({"tokens": tokens, "logits": logits.contiguous()}, file)

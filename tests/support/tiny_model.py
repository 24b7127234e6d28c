"""Tiny random models as Hugging Face directories, for tests that run real vLLM or real Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 256
MAX_POSITIONS = 512
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,  # of 32, the least that vLLM's CPU attention takes
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # wide enough that two seeds disagree on almost every greedy token
}


def make_tiny_model(
    path: Path, seed: int, *, architecture: str = "llama", tied: bool = True, dtype: str = "float32"
) -> Path:
    """Write a model of random weights drawn from `seed` to the directory `path`, and return it.

    `architecture` is `llama` or `qwen2`; `dtype` is torch's name of an element type.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    config_class: Any = {"llama": LlamaConfig, "qwen2": Qwen2Config}[architecture]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config_class(tie_word_embeddings=tied, **_SHAPE), dtype=getattr(torch, dtype)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms begin at one and biases at zero, which would hide a lost tensor
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.1)
            assert parameter.isfinite().all(), name
    model.save_pretrained(path, safe_serialization=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}, indent=2))
    return path

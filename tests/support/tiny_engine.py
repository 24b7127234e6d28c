"""What tests of real vLLM share: settings for a tiny model, and its weights, read and trained a little."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_agent.vllm.settings import VllmSettings

State = Mapping[str, Any]


def tiny_settings(model: Path, **more: Any) -> VllmSettings:
    """The least of memory, and numbers that a reference can be held against."""
    values: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 32 << 20,
    }
    return VllmSettings(model, **values | more)


def read_state(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    state: dict[str, Any] = load_file(model / "model.safetensors")
    return state


def trained(state: State, seed: int) -> State:
    """Every tensor moved a little, the tied embedding too."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in state.items()}

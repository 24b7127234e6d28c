"""Which Hugging Face model families a Megatron model can be loaded from and exported to.

One file a family; a new one is added to `FAMILIES` here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_agent.megatron.errors import UnsupportedModel
from trainer_agent.megatron.families.decoder import DecoderShape, Family
from trainer_agent.megatron.families.llama import LLAMA
from trainer_agent.megatron.families.mixtral import MIXTRAL
from trainer_agent.megatron.families.qwen2 import QWEN2
from trainer_agent.megatron.families.qwen2_moe import QWEN2_MOE
from trainer_agent.megatron.families.qwen3 import QWEN3
from trainer_agent.megatron.families.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "DecoderShape", "Family", "UnsupportedModel", "family_of", "read_config"]

FAMILIES: Mapping[str, Family] = {f.model_type: f for f in (LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE)}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config by its `model_type`.

    Raises:
        UnsupportedModel: no family has that type.
    """
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise UnsupportedModel(f"model_type {model_type!r} has no mapping; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def read_config(source: Any) -> dict[str, Any]:
    """A model's config as a dict: from a model directory, a config.json's dict, or a transformers config."""
    if isinstance(source, str | Path):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        config: dict[str, Any] = json.loads(path.read_text())
        return config
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "to_dict"):
        return dict(source.to_dict())
    raise TypeError(f"a model directory, a dict or a transformers config is wanted, got {type(source).__name__}")

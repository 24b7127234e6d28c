"""Megatron's GroupedMLP on a CPU: its kernels are CUDA's, but where its weights lie can be seen all the same.

`grouped_gemm` is stood in for by a loop over experts, in this process only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.megatron_logits import logits_of


def grouped_facts(model_dir: Path, expert_parallel: int) -> dict[str, Any]:
    """What Megatron says without its kernels; with the stand-in: what is exported, and what the model computes."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import grouped_gemm_util

    from trainer_agent.megatron.build import build_from_hf
    from trainer_agent.megatron.source import MegatronSource

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    (sequential,) = build_from_hf(model_dir, expert_parallel=expert_parallel)
    facts: dict[str, Any] = {}
    try:
        build_from_hf(model_dir, moe_grouped_gemm=True, expert_parallel=expert_parallel)
    except AssertionError as error:
        facts["without_kernels"] = str(error)
    # Modules of Megatron's hold on to the functions' module, not to the functions.
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    grouped_gemm_util.ops = SimpleNamespace(gmm=_one_by_one)
    # Its forward pass insists on the flag; the numbers stay those of the model, so that they can be compared.
    (grouped,) = build_from_hf(model_dir, moe_grouped_gemm=True, bf16=True, expert_parallel=expert_parallel)
    facts["kind"] = type(grouped.decoder.layers[0].mlp.experts).__name__
    facts["exported"] = digests(MegatronSource(grouped, model_dir))
    tokens = torch.arange(32).view(2, 16)
    ours, theirs = logits_of([grouped], tokens), logits_of([sequential], tokens)
    assert ours is not None
    assert theirs is not None
    facts["logit_difference"] = float((ours - theirs).abs().max())
    return facts


def digests(source: Any) -> dict[str, str]:
    """sha256 of each tensor's bytes, in the order of iteration."""
    return {n: hashlib.sha256(t.flatten().view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in source}


def _one_by_one(tokens: Tensor, weights: Tensor, counts: Tensor, trans_b: bool = False) -> Tensor:
    """[tokens of all experts, in], [experts, in, out], how many tokens each has -> [tokens, out]."""
    assert not trans_b
    parts = torch.split(tokens, counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])

"""How to sample, in vLLM's own words. Shared by the rollout client, the wire and the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling fields under vLLM's own names."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    """Of the first sample; sample i has this plus i."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = 0
    """0 gives the sampled token's logprob only. The engine runs with processed logprobs."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    """Samples of one prompt."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Any other field of vLLM's SamplingParams, by its name; plain JSON values."""
    priority: int = 0
    """Not of the sampling, but of its request: lower goes before."""
    prompt_logprobs: bool = False
    """The prompt's logprobs too, at temperature 1: what a score asks for."""

"""Mixtures of experts: a router, experts that are split over the ranks, and perhaps one that every token passes.

On disk each expert has three tensors of its own, which is what transformers' `save_pretrained` writes and what
vLLM's loaders take; that transformers 5 fuses them in memory (`experts.gate_up_proj`) does not concern us.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_agent.megatron.families.decoder import DecoderShape, Experts, LayerNames, MlpNames, mlp_entries
from trainer_agent.megatron.families.rules import Entry, Whole


def expert_entries(
    at: LayerNames, block: str, names: MlpNames, shape: DecoderShape, experts: Experts
) -> Iterator[Entry]:
    """The router and the experts, in the order of their numbers. `block` is the checkpoint's name of the mixture."""
    yield at.entry("mlp.router.weight", {f"{block}.gate.weight": (experts.count, shape.hidden)}, Whole())
    for expert in range(experts.count):
        own = MlpNames(f"{block}.experts.{expert}", names.gate, names.up, names.down)
        yield from mlp_entries(at, f"mlp.experts.{expert}", own, shape.hidden, experts.ffn, expert=expert)


@dataclass(frozen=True, slots=True)
class MixtralExperts:
    """In every layer, as wide as the config's `intermediate_size`; the chosen ones' weights sum to one."""

    def read(self, config: Mapping[str, Any]) -> Experts | None:
        return Experts(
            count=config["num_local_experts"],
            per_token=config["num_experts_per_tok"],
            ffn=config["intermediate_size"],
            layers=frozenset(range(config["num_hidden_layers"])),
            normalised=True,
        )

    def entries(self, at: LayerNames, shape: DecoderShape, experts: Experts) -> Iterator[Entry]:
        yield from expert_entries(at, "block_sparse_moe", MlpNames("", "w1", "w3", "w2"), shape, experts)


@dataclass(frozen=True, slots=True)
class QwenExperts:
    """In every n-th layer that is not listed as dense, of a width of their own."""

    def read(self, config: Mapping[str, Any]) -> Experts | None:
        # transformers 5 writes the count of Qwen3's under Mixtral's key.
        count = config.get("num_experts") or config.get("num_local_experts") or 0
        step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
        layers = frozenset(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)
        if not count or not layers:
            return None
        return Experts(
            count=count,
            per_token=config["num_experts_per_tok"],
            ffn=config["moe_intermediate_size"],
            layers=layers,
            normalised=bool(config.get("norm_topk_prob", False)),
            shared_ffn=config.get("shared_expert_intermediate_size"),
        )

    def entries(self, at: LayerNames, shape: DecoderShape, experts: Experts) -> Iterator[Entry]:
        yield from expert_entries(at, "mlp", MlpNames(""), shape, experts)
        if experts.shared_ffn:
            shared = MlpNames("mlp.shared_expert")
            yield from mlp_entries(at, "mlp.shared_experts", shared, shape.hidden, experts.shared_ffn)
            gate = {"mlp.shared_expert_gate.weight": (1, shape.hidden)}
            yield at.entry("mlp.shared_experts.gate_weight", gate, Whole())

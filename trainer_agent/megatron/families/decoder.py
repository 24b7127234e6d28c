"""Decoders in Llama's shape: what their config means and how their parameters map.

A family states only in what it differs (query/key/value bias, norms on queries and keys, experts) and which
config flags it does not cover. A flag that would change the mathematics or add tensors is refused when
set; it is never ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainer_agent.megatron.errors import UnsupportedModel
from trainer_agent.megatron.families.rules import Entry, GateUp, HfTensor, QueryKeyValue, Rule, Split, Vocabulary, Whole

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_OUTPUT = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Experts:
    """The numbers of a model's mixtures of experts. Sizes are of the whole model, not of a shard."""

    count: int
    per_token: int
    ffn: int
    layers: frozenset[int]
    """Which layers have them, from 0; the others are dense."""
    normalised: bool
    """Whether the weights of a token's chosen experts sum to one."""
    shared_ffn: int | None = None
    """Width of the expert that every token passes, behind a gate of its own; None: there is none."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers of a config that decide names and shapes. Counts are of the whole model, not of a shard."""

    layers: int
    hidden: int
    ffn: int
    """Of a dense layer."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """The output layer is the embedding; then there is no `lm_head.weight` of its own."""
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    """What the rotary base is where the config gives none."""
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"{self.heads} heads do not divide over {self.kv_heads} key/value heads")

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers


class Family(Protocol):
    @property
    def model_type(self) -> str:
        """`model_type` in config.json."""
        ...

    def shape(self, config: Mapping[str, Any]) -> DecoderShape: ...

    def entries(self, shape: DecoderShape) -> Iterator[Entry]:
        """Every parameter that is exported, layer by layer, in the order of export."""
        ...


class ExpertMapping(Protocol):
    """How a family states its experts and names their tensors."""

    def read(self, config: Mapping[str, Any]) -> Experts | None:
        """None when no layer has experts."""
        ...

    def entries(self, at: LayerNames, shape: DecoderShape, experts: Experts) -> Iterator[Entry]:
        """One layer's router and experts."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    model_type: str
    qkv_bias: bool = False
    qkv_bias_flag: str = ""
    """The config's flag that says whether there are such biases, where it has one."""
    qk_norm: bool = False
    head_dim: int | None = None
    """When the config gives none; None: hidden size by heads."""
    rope_theta: float = 10_000.0
    """When the config gives none."""
    refused_flags: tuple[str, ...] = ()
    experts: ExpertMapping | None = None

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        self._refuse(config)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return DecoderShape(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            ffn=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or self.head_dim or hidden // heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get(self.qkv_bias_flag, self.qkv_bias)),
            qk_norm=self.qk_norm,
            rope_theta=self.rope_theta,
            experts=self.experts.read(config) if self.experts else None,
        )

    def entries(self, shape: DecoderShape) -> Iterator[Entry]:
        words, width = (shape.vocab, shape.hidden), (shape.hidden,)
        yield Entry(EMBEDDING, (HfTensor(HF_EMBEDDING, words),), Vocabulary(shape.vocab))
        for index in range(shape.layers):
            yield from self.layer(shape, index)
        yield Entry("decoder.final_layernorm.weight", (HfTensor("model.norm.weight", width),), Whole())
        if not shape.tied:
            yield Entry(OUTPUT, (HfTensor(HF_OUTPUT, words),), Vocabulary(shape.vocab))

    def layer(self, shape: DecoderShape, index: int) -> Iterator[Entry]:
        at = LayerNames(index)
        yield at.entry("input_layernorm.weight", {"input_layernorm.weight": (shape.hidden,)}, Whole())
        yield from attention_entries(at, shape)
        yield at.entry("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": (shape.hidden,)}, Whole())
        if self.experts and shape.experts and shape.has_experts(index):
            yield from self.experts.entries(at, shape, shape.experts)
        else:
            yield from mlp_entries(at, "mlp", MlpNames("mlp"), shape.hidden, shape.ffn)

    def _refuse(self, config: Mapping[str, Any]) -> None:
        flags = [flag for flag in self.refused_flags if config.get(flag)]
        if flags:
            raise UnsupportedModel(f"{self.model_type} with {', '.join(flags)} set is not supported")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"{self.model_type} with hidden_act {config['hidden_act']!r} is not supported")


@dataclass(frozen=True, slots=True)
class LayerNames:
    index: int

    def entry(
        self, megatron: str, hf: Mapping[str, tuple[int, ...]], rule: Rule, *, expert: int | None = None
    ) -> Entry:
        tensors = tuple(HfTensor(f"model.layers.{self.index}.{name}", shape) for name, shape in hf.items())
        return Entry(f"decoder.layers.{self.index}.{megatron}", tensors, rule, expert)


@dataclass(frozen=True, slots=True)
class MlpNames:
    """What the checkpoint calls a gated feed-forward's three projections."""

    prefix: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def mlp_entries(
    at: LayerNames, megatron: str, names: MlpNames, hidden: int, ffn: int, *, expert: int | None = None
) -> Iterator[Entry]:
    """A gated feed-forward: of a dense layer, of one expert, or of the shared one."""
    up, down = (ffn, hidden), (hidden, ffn)
    gate_up = {f"{names.prefix}.{names.gate}.weight": up, f"{names.prefix}.{names.up}.weight": up}
    yield at.entry(f"{megatron}.linear_fc1.weight", gate_up, GateUp(), expert=expert)
    yield at.entry(
        f"{megatron}.linear_fc2.weight", {f"{names.prefix}.{names.down}.weight": down}, Split(1), expert=expert
    )


def attention_entries(at: LayerNames, shape: DecoderShape) -> Iterator[Entry]:
    """Grouped-query attention: one layer's fused projection, output projection and norms of queries and keys."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rule = QueryKeyValue(shape.heads, shape.kv_heads, shape.head_dim)
    rows = {"q": q, "k": kv, "v": kv}
    weights = {f"self_attn.{x}_proj.weight": (n, shape.hidden) for x, n in rows.items()}
    yield at.entry("self_attention.linear_qkv.weight", weights, rule)
    if shape.qkv_bias:
        biases = {f"self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
        yield at.entry("self_attention.linear_qkv.bias", biases, rule)
    if shape.qk_norm:
        for x in "qk":
            norm = {f"self_attn.{x}_norm.weight": (shape.head_dim,)}
            yield at.entry(f"self_attention.{x}_layernorm.weight", norm, Whole())
    yield at.entry("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": (shape.hidden, q)}, Split(1))

"""Dense decoders in Llama's shape: what their config means and how their parameters map.

A family states only in what it differs (query/key/value bias, norms on queries and keys) and which
config flags it does not cover. A flag that would change the mathematics or add tensors is refused when
set; it is never ignored. A family with another layer (mixture of experts) writes its own `layer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainer_agent.megatron.families.rules import Entry, GateUp, HfTensor, QueryKeyValue, Rule, Split, Vocabulary, Whole

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_OUTPUT = "lm_head.weight"


class UnsupportedModel(ValueError):
    """The model's config asks for something that its family's mapping does not cover."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers of a config that decide names and shapes. Counts are of the whole model, not of a shard."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """The output layer is the embedding; then there is no `lm_head.weight` of its own."""
    qkv_bias: bool
    qk_norm: bool

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"{self.heads} heads do not divide over {self.kv_heads} key/value heads")


class Family(Protocol):
    @property
    def model_type(self) -> str:
        """`model_type` in config.json."""
        ...

    def shape(self, config: Mapping[str, Any]) -> DecoderShape: ...

    def entries(self, shape: DecoderShape) -> Iterator[Entry]:
        """Every parameter that is exported, layer by layer, in the order of export."""
        ...


@dataclass(frozen=True, slots=True)
class DenseFamily:
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    """When the config gives none; None: hidden size by heads."""
    refused_flags: tuple[str, ...] = ()

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
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
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
        up, down = (shape.ffn, shape.hidden), (shape.hidden, shape.ffn)
        yield at.entry("mlp.linear_fc1.weight", {"mlp.gate_proj.weight": up, "mlp.up_proj.weight": up}, GateUp())
        yield at.entry("mlp.linear_fc2.weight", {"mlp.down_proj.weight": down}, Split(1))

    def _refuse(self, config: Mapping[str, Any]) -> None:
        flags = [flag for flag in self.refused_flags if config.get(flag)]
        if flags:
            raise UnsupportedModel(f"{self.model_type} with {', '.join(flags)} set is not supported")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"{self.model_type} with hidden_act {config['hidden_act']!r} is not supported")


@dataclass(frozen=True, slots=True)
class LayerNames:
    index: int

    def entry(self, megatron: str, hf: Mapping[str, tuple[int, ...]], rule: Rule) -> Entry:
        tensors = tuple(HfTensor(f"model.layers.{self.index}.{name}", shape) for name, shape in hf.items())
        return Entry(f"decoder.layers.{self.index}.{megatron}", tensors, rule)


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

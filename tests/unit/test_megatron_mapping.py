"""The mapping between Megatron's and Hugging Face's tensors: pure, at any tensor parallelism."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_agent.megatron.families import FAMILIES, UnsupportedModel, family_of, read_config
from trainer_agent.megatron.families.rules import (
    Entry,
    GateUp,
    HfTensor,
    Place,
    QueryKeyValue,
    Rule,
    Split,
    Vocabulary,
    Whole,
    mismatches,
)
from trainer_agent.megatron.parameters import chunks_of, global_name, unwrap

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
RULES: list[tuple[Rule, list[tuple[int, ...]]]] = [
    (Whole(), [(6,)]),
    (Split(0), [(8, 3)]),
    (Split(1), [(3, 8)]),
    (GateUp(), [(8, 3), (8, 3)]),
    (QueryKeyValue(heads=8, kv_heads=4, head_dim=2), [(16, 3), (8, 3), (8, 3)]),
    (QueryKeyValue(heads=8, kv_heads=4, head_dim=2), [(16,), (8,), (8,)]),
    (Vocabulary(rows=8), [(8, 3)]),
]


def distinct(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of which no two elements are alike."""
    counter = itertools.count()
    return [
        torch.tensor([next(counter) for _ in range(torch.Size(s).numel())], dtype=torch.float32).view(s) for s in shapes
    ]


def shards_of(rule: Rule, tensors: list[torch.Tensor], size: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [rule.to_megatron(tensors, Place(rank, size, shape)) for rank in range(size if rule.sharded else 1)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("rule", "shapes"), RULES, ids=lambda value: type(value).__name__)
def test_there_and_back_is_the_identity_at_any_tensor_parallelism(
    rule: Rule, shapes: list[tuple[int, ...]], size: int
) -> None:
    tensors = distinct(*shapes)
    shards = shards_of(rule, tensors, size, (8 // size, 3))
    back = rule.to_hf(shards)
    assert [t.tolist() for t in back] == [t.tolist() for t in tensors]


def test_query_key_value_rows_stand_group_by_group() -> None:
    query, key, value = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    rule = QueryKeyValue(heads=4, kv_heads=2, head_dim=1)
    assert rule.to_megatron([query, key, value], Place(0, 1, (8,))).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert rule.to_megatron([query, key, value], Place(1, 2, (4,))).tolist() == [2, 3, 11, 21]


def test_a_shard_of_gate_and_up_holds_its_part_of_each() -> None:
    gate, up = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])
    assert GateUp().to_megatron([gate, up], Place(1, 2, (4,))).tolist() == [2, 3, 12, 13]


def test_padding_of_the_vocabulary_is_zero_inside_and_never_leaves() -> None:
    (words,) = distinct((5, 2))
    rule = Vocabulary(rows=5)
    shards = [rule.to_megatron([words], Place(rank, 4, (2, 2))) for rank in range(4)]
    assert [s.shape[0] for s in shards] == [2, 2, 2, 2]
    assert shards[2][1].tolist() == [0, 0]
    assert shards[3].count_nonzero() == 0
    assert torch.equal(rule.to_hf(shards)[0], words)


def test_rows_that_do_not_divide_over_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide over 2"):
        Split(0).to_megatron([torch.zeros(3, 2)], Place(0, 2, (1, 2)))


def test_a_shape_that_is_not_the_configs_is_named() -> None:
    entry = Entry("mlp.linear_fc2.weight", (HfTensor("down_proj.weight", (4, 8)),), Split(1))
    assert mismatches(entry, (4, 4), tensor_parallel=2) == []
    (problem,) = mismatches(entry, (4, 8), tensor_parallel=2)
    assert "down_proj.weight" in problem
    assert "(4, 16)" in problem


def test_shards_that_cannot_be_put_together_are_a_mismatch_and_not_a_crash() -> None:
    rule = QueryKeyValue(heads=4, kv_heads=2, head_dim=4)
    entry = Entry("qkv", (HfTensor("q", (16, 8)), HfTensor("k", (8, 8)), HfTensor("v", (8, 8))), rule)
    assert mismatches(entry, (9, 8), tensor_parallel=2)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False])
def test_names_are_unique_and_a_tied_output_layer_is_not_among_them(model_type: str, tied: bool) -> None:
    config = CONFIG | {"model_type": model_type, "tie_word_embeddings": tied}
    family = family_of(config)
    entries = list(family.entries(family.shape(config)))
    names = [tensor.name for entry in entries for tensor in entry.hf]
    assert len(set(names)) == len(names)
    assert len({entry.megatron for entry in entries}) == len(entries)
    assert names[0] == "model.embed_tokens.weight"
    assert ("lm_head.weight" in names) is not tied


def test_export_goes_layer_by_layer() -> None:
    family = family_of(CONFIG)
    layers = [e.megatron.split(".")[2] for e in family.entries(family.shape(CONFIG)) if ".layers." in e.megatron]
    assert layers == sorted(layers)


def test_families_differ_in_biases_and_head_norms_only() -> None:
    names = {}
    for model_type, family in FAMILIES.items():
        config = CONFIG | {"model_type": model_type, "head_dim": 8}
        names[model_type] = {
            t.name for e in family.entries(family.shape(config)) for t in e.hf if ".layers.0." in t.name
        }
    layer = "model.layers.0.self_attn."
    assert names["qwen2"] - names["llama"] == {f"{layer}{x}_proj.bias" for x in "qkv"}
    assert names["qwen3"] - names["llama"] == {f"{layer}{x}_norm.weight" for x in "qk"}
    assert names["llama"] < names["qwen2"]


def test_defaults_of_a_config_are_its_familys() -> None:
    llama = family_of(CONFIG).shape(CONFIG | {"num_key_value_heads": None})
    assert (llama.kv_heads, llama.head_dim, llama.tied) == (8, 8, False)
    qwen3 = CONFIG | {"model_type": "qwen3"}
    assert family_of(qwen3).shape(qwen3).head_dim == 128


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 3},
        {"model_type": "qwen2", "use_sliding_window": True},
        {"model_type": "mamba"},
        {"model_type": None},
    ],
)
def test_what_the_mapping_does_not_cover_is_refused(change: dict[str, Any]) -> None:
    config = CONFIG | change
    with pytest.raises(UnsupportedModel):
        family_of(config).shape(config)


def test_a_config_is_read_from_a_directory_a_file_a_dict_or_a_transformers_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    as_object = SimpleNamespace(to_dict=lambda: CONFIG)
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json", CONFIG, as_object):
        assert read_config(source) == CONFIG
    with pytest.raises(TypeError, match="int"):
        read_config(7)


def stage(*layer_numbers: int) -> Any:
    """A pipeline stage whose layers have these numbers, counted from one as Megatron does."""
    return SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=n) for n in layer_numbers]))


def test_layers_are_counted_over_all_stages() -> None:
    assert (
        global_name("decoder.layers.1.mlp.linear_fc2.weight", stage(5, 6)) == "decoder.layers.5.mlp.linear_fc2.weight"
    )
    assert global_name("decoder.final_layernorm.weight", stage()) == "decoder.final_layernorm.weight"


def test_norms_inside_transformer_engines_linear_layers_have_their_usual_names() -> None:
    fused = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "decoder.layers.0.pre_mlp_layernorm.weight",
    }
    assert {name: global_name(name, stage(1)) for name in fused} == fused


def test_wrappers_and_virtual_chunks_are_taken_off() -> None:
    bare = SimpleNamespace(config=1)
    assert unwrap(SimpleNamespace(module=SimpleNamespace(module=bare))) is bare
    assert chunks_of([bare, bare]) == [bare, bare]
    assert chunks_of(bare) == [bare]

"""The mapping between Megatron's and Hugging Face's tensors: pure, at any tensor and expert parallelism."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import hf_models
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
from trainer_agent.megatron.parameters import chunks_of, global_parameters, named_parameters, unwrap

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
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


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    return CONFIG | EXPERTS.get(model_type, {}) | {"model_type": model_type} | changes


def entries_of(config: dict[str, Any]) -> list[Entry]:
    family = family_of(config)
    return list(family.entries(family.shape(config)))


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


def test_every_family_has_a_model_that_real_megatron_is_tried_with() -> None:
    assert hf_models.FAMILIES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False])
def test_names_are_unique_and_a_tied_output_layer_is_not_among_them(model_type: str, tied: bool) -> None:
    config = config_of(model_type, tie_word_embeddings=tied)
    entries = entries_of(config)
    names = [tensor.name for entry in entries for tensor in entry.hf]
    assert len(set(names)) == len(names)
    assert len({entry.megatron for entry in entries}) == len(entries)
    assert names[0] == "model.embed_tokens.weight"
    assert ("lm_head.weight" in names) is not tied


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_export_goes_layer_by_layer_and_expert_by_expert(model_type: str) -> None:
    entries = entries_of(config_of(model_type))
    layers = [e.megatron.split(".")[2] for e in entries if ".layers." in e.megatron]
    assert layers == sorted(layers)
    experts = [e.expert for e in entries if ".layers.0." in e.megatron and e.expert is not None]
    assert experts == sorted(experts)


def names_in_layer(model_type: str, layer: int, **changes: Any) -> set[str]:
    prefix = f"model.layers.{layer}."
    names = {t.name for e in entries_of(config_of(model_type, head_dim=8, **changes)) for t in e.hf}
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_dense_families_differ_in_biases_and_head_norms_only() -> None:
    llama = names_in_layer("llama", 0)
    assert names_in_layer("qwen2", 0) - llama == {f"self_attn.{x}_proj.bias" for x in "qkv"}
    assert names_in_layer("qwen3", 0) - llama == {f"self_attn.{x}_norm.weight" for x in "qk"}
    assert llama < names_in_layer("qwen2", 0)


def test_families_with_experts_differ_from_dense_ones_in_their_feed_forward_only() -> None:
    feed_forward = {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    for dense, mixture in (("llama", "mixtral"), ("qwen2", "qwen2_moe"), ("qwen3", "qwen3_moe")):
        names = names_in_layer(mixture, 0)
        assert {name for name in names if "mlp." not in name and "moe." not in name} == {
            name for name in names_in_layer(dense, 0) if name not in feed_forward
        }


def test_experts_have_the_names_that_they_have_on_disk() -> None:
    mixtral = {name for name in names_in_layer("mixtral", 0) if "moe" in name}
    experts = {f"block_sparse_moe.experts.{e}.{w}.weight" for e in range(4) for w in ("w1", "w2", "w3")}
    assert mixtral == experts | {"block_sparse_moe.gate.weight"}
    qwen3 = {name for name in names_in_layer("qwen3_moe", 0) if "mlp" in name}
    experts = {f"mlp.experts.{e}.{p}_proj.weight" for e in range(4) for p in ("gate", "up", "down")}
    assert qwen3 == experts | {"mlp.gate.weight"}
    shared = {f"mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")}
    assert names_in_layer("qwen2_moe", 0) - qwen3 >= shared | {"mlp.shared_expert_gate.weight"}


def test_layers_without_experts_are_dense_ones_of_the_models_own_width() -> None:
    dense = {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    assert {n for n in names_in_layer("qwen3_moe", 1, mlp_only_layers=[1]) if "mlp" in n} == dense
    assert {n for n in names_in_layer("qwen3_moe", 0, decoder_sparse_step=2) if "mlp" in n} == dense
    assert "mlp.gate.weight" in names_in_layer("qwen3_moe", 1, decoder_sparse_step=2)
    shapes = {t.name: t.shape for e in entries_of(config_of("qwen3_moe", mlp_only_layers=[1])) for t in e.hf}
    assert shapes["model.layers.1.mlp.up_proj.weight"] == (96, 64)
    assert shapes["model.layers.0.mlp.experts.3.up_proj.weight"] == (48, 64)


def test_a_model_whose_layers_are_all_dense_has_no_experts() -> None:
    config = config_of("qwen3_moe", mlp_only_layers=[0, 1, 2])
    assert family_of(config).shape(config).experts is None
    assert [e for e in entries_of(config) if e.expert is not None] == []


def test_the_number_of_experts_stands_under_either_of_two_keys() -> None:
    """transformers 5 writes Qwen3-MoE's as num_local_experts; checkpoints on the hub have num_experts."""
    config = config_of("qwen3_moe")
    config["num_local_experts"] = config.pop("num_experts")
    assert entries_of(config) == entries_of(config_of("qwen3_moe"))


def test_only_experts_are_marked_as_such() -> None:
    for entry in entries_of(config_of("qwen2_moe")):
        _, _, after = entry.megatron.partition(".experts.")
        assert entry.expert == (int(after.split(".")[0]) if after else None)
        assert all((".experts." in t.name) == (entry.expert is not None) for t in entry.hf)


def test_defaults_of_a_config_are_its_familys() -> None:
    llama = family_of(CONFIG).shape(CONFIG | {"num_key_value_heads": None})
    assert (llama.kv_heads, llama.head_dim, llama.tied) == (8, 8, False)
    qwen3 = CONFIG | {"model_type": "qwen3"}
    assert family_of(qwen3).shape(qwen3).head_dim == 128
    qwen2_moe = config_of("qwen2_moe")
    assert family_of(qwen2_moe).shape(qwen2_moe).qkv_bias
    assert not family_of(qwen2_moe).shape(qwen2_moe | {"qkv_bias": False}).qkv_bias
    assert (llama.rope_theta, family_of(config_of("mixtral")).shape(config_of("mixtral")).rope_theta) == (1e4, 1e6)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 3},
        {"model_type": "qwen2", "use_sliding_window": True},
        config_of("mixtral", sliding_window=4096),
        config_of("mixtral", router_jitter_noise=0.1),
        config_of("qwen2_moe", use_sliding_window=True),
        config_of("qwen3_moe", attention_bias=True),
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


def stage(*layer_numbers: int, experts: tuple[int, ...] = ()) -> Any:
    """A pipeline stage whose layers have these numbers, counted from one as Megatron does, and these experts each."""
    mlp = SimpleNamespace(local_expert_indices=list(experts))
    layers = [SimpleNamespace(layer_number=n, mlp=mlp) for n in layer_numbers]
    return SimpleNamespace(decoder=SimpleNamespace(layers=layers))


def global_names(name: str, chunk: Any) -> list[str]:
    return [found for found, _ in global_parameters(name, torch.zeros(6, 6), chunk)]


def test_layers_are_counted_over_all_stages() -> None:
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert global_names(name, stage(5, 6)) == ["decoder.layers.5.mlp.linear_fc2.weight"]
    assert global_names("decoder.final_layernorm.weight", stage()) == ["decoder.final_layernorm.weight"]


def test_norms_inside_transformer_engines_linear_layers_have_their_usual_names() -> None:
    fused = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "decoder.layers.0.pre_mlp_layernorm.weight",
    }
    assert {name: global_names(name, stage(1))[0] for name in fused} == fused


@pytest.mark.parametrize(
    "local",
    [
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",  # SequentialMLP
        "decoder.layers.0.mlp.experts.linear_fc1.weight1",  # TEGroupedMLP
    ],
)
def test_experts_are_counted_over_all_ranks(local: str) -> None:
    assert global_names(local, stage(3, experts=(4, 5))) == ["decoder.layers.2.mlp.experts.5.linear_fc1.weight"]


def test_a_bias_of_an_expert_keeps_being_one() -> None:
    """No family has one: under a name of its own it is refused, and not taken for a weight."""
    (name,) = global_names("decoder.layers.0.mlp.experts.linear_fc2.bias0", stage(1, experts=(7,)))
    assert name == "decoder.layers.0.mlp.experts.7.linear_fc2.bias"


def test_experts_side_by_side_in_one_parameter_are_views_that_can_be_written() -> None:
    """GroupedMLP: its forward reads weight1 as [experts, hidden, 2 ffn] and weight2 as [experts, ffn, hidden]."""
    hidden, ffn, chunk = 3, 2, stage(1, experts=(6, 7))
    parameters = {
        "decoder.layers.0.mlp.experts.weight1": torch.arange(24.0).view(hidden, 2 * 2 * ffn),
        "decoder.layers.0.mlp.experts.weight2": torch.arange(12.0).view(2 * ffn, hidden),
    }
    chunk.named_parameters = parameters.items
    found = dict(named_parameters(chunk))
    assert [(name, tuple(t.shape)) for name, t in found.items()] == [
        ("decoder.layers.0.mlp.experts.6.linear_fc1.weight", (2 * ffn, hidden)),
        ("decoder.layers.0.mlp.experts.7.linear_fc1.weight", (2 * ffn, hidden)),
        ("decoder.layers.0.mlp.experts.6.linear_fc2.weight", (hidden, ffn)),
        ("decoder.layers.0.mlp.experts.7.linear_fc2.weight", (hidden, ffn)),
    ]
    weight1 = parameters["decoder.layers.0.mlp.experts.weight1"]
    second = found["decoder.layers.0.mlp.experts.7.linear_fc1.weight"]
    assert torch.equal(second, weight1.view(2, hidden, 2 * ffn)[1].t())
    second.fill_(-1)
    assert torch.equal(weight1.flatten()[12:], torch.full((12,), -1.0))


def test_wrappers_and_virtual_chunks_are_taken_off() -> None:
    bare = SimpleNamespace(config=1)
    assert unwrap(SimpleNamespace(module=SimpleNamespace(module=bare))) is bare
    assert chunks_of([bare, bare]) == [bare, bare]
    assert chunks_of(bare) == [bare]

"""MegatronSource on four real Megatron ranks, split in every way: each rank yields the checkpoint, and engines of every
slot size get it through every transport, bit for bit.

Over gloo; a part of what `make sweep` runs. One set of processes builds all models, one topology after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sweep.launch import Facts, make_models, run
from tests.sweep.pushes import PUSHES
from tests.sweep.receiving import TRANSPORTS, slots
from tests.sweep.topology import Topology

pytestmark = pytest.mark.real

RANKS = 4
TRANSPORT_NAMES = [transport.value for transport in TRANSPORTS]
SLOT_SIZES = list(slots(RANKS))
LOGIT_TOLERANCE = 1e-5
MEMORY_IN_PARAMETERS = 4
"""Shards, what they make when joined, and the tensors that this is taken apart into, while the next shard comes."""


def topology(family: str, *, tied: bool = True, dtype: str = "float32", **sizes: int | str) -> Topology:
    return Topology(RANKS, family, tied, dtype, **sizes)  # type: ignore[arg-type]


TOPOLOGIES = [
    topology("llama", tensor=4, expert_tensor=4),
    topology("qwen2", tied=False, dtype="bfloat16", tensor=2, context=2, expert_tensor=2),
    topology("qwen3", tensor=2, pipeline=2, virtual_pipeline=2, expert_tensor=2),
    topology("llama", tied=False, pipeline=2, context=2),
    topology("qwen2", pipeline=2, virtual_pipeline=2),
    topology("llama", pipeline=4, layout="E|tt|tt|L"),
    topology("qwen3", dtype="bfloat16", context=4),
    topology("mixtral", tied=False, expert=4),
    topology("mixtral", tensor=2, expert=2, expert_tensor=1),
    topology("qwen3_moe", dtype="bfloat16", tensor=2, expert=2, expert_tensor=2),
    topology("qwen3_moe", tied=False, pipeline=2, expert=2),
    topology("qwen3_moe", pipeline=2, virtual_pipeline=2, context=2, expert=2),
    topology("qwen2_moe", tensor=2, pipeline=2, expert=2, expert_tensor=1),
    topology("qwen2_moe", tied=False, dtype="bfloat16", context=2, expert=2, expert_tensor=2),
    topology("mixtral", tied=False, dtype="bfloat16", tensor=4, expert_tensor=4),
]
WITH_LOGITS = [t for t in TOPOLOGIES if t.dtype == "float32"]
WITH_EXPERTS = [t for t in TOPOLOGIES if t.has_experts]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    directory: Path = tmp_path_factory.mktemp("topologies")
    make_models(directory / "models", TOPOLOGIES)
    how: dict[str, Any] = {"logits": True, "push": True, "hook": "tests.sweep.hooks:second_pass"}
    return {t.name: ranks for t, ranks in run(TOPOLOGIES, directory, **how)}


def by_name(t: Topology) -> str:
    return t.name


@pytest.mark.parametrize("t", TOPOLOGIES, ids=by_name)
def test_every_rank_yields_every_tensor_of_the_checkpoint_bit_for_bit(t: Topology, facts: dict[str, Facts]) -> None:
    for rank in facts[t.name]:
        assert rank["failure"] is None
        assert rank["names"] > 0
        assert (rank["wrong"], rank["missing"]) == ([], [])


@pytest.mark.parametrize("t", TOPOLOGIES, ids=by_name)
def test_metadata_and_ties_are_the_checkpoints_on_every_rank(t: Topology, facts: dict[str, Facts]) -> None:
    for rank in facts[t.name]:
        assert rank["metadata_agrees"]
        assert rank["ties"] == ([["lm_head.weight", "model.embed_tokens.weight"]] if t.tied else [])


@pytest.mark.parametrize("t", TOPOLOGIES, ids=by_name)
def test_a_second_pass_yields_the_same_on_every_rank(t: Topology, facts: dict[str, Facts]) -> None:
    passes = [(rank["hook"]["names"], rank["hook"]["digest"]) for rank in facts[t.name]]
    assert passes == [passes[0]] * RANKS
    assert passes[0][0] == facts[t.name][0]["names"]


@pytest.mark.parametrize("t", TOPOLOGIES, ids=by_name)
def test_engines_of_every_slot_size_get_the_checkpoint_bit_for_bit_in_three_pushes(
    t: Topology, facts: dict[str, Facts]
) -> None:
    received = facts[t.name][0]["hook"]["received"]
    assert received.keys() == {f"{transport}-slot{size}" for transport in TRANSPORT_NAMES for size in SLOT_SIZES}
    for engine, pushes in received.items():
        assert [(push["wrong"], push["missing"]) for push in pushes] == [([], [])] * PUSHES, engine
        assert {push["tensors"] for push in pushes} == {facts[t.name][0]["names"]}


@pytest.mark.parametrize("t", TOPOLOGIES, ids=by_name)
def test_each_engine_was_fed_by_the_transport_that_was_asked_for(t: Topology, facts: dict[str, Facts]) -> None:
    for transport in TRANSPORT_NAMES:
        ways = [rank["hook"]["pushed"][transport]["ways"] for rank in facts[t.name]]
        assert {engine for rank in ways for engine in rank} == {f"{transport}-slot{size}" for size in SLOT_SIZES}
        assert {way for rank in ways for way in rank.values()} == {transport}


@pytest.mark.parametrize("t", TOPOLOGIES, ids=by_name)
def test_engines_on_a_slots_devices_get_a_buffer_for_each_of_them(t: Topology, facts: dict[str, Facts]) -> None:
    received = facts[t.name][0]["hook"]["received"]
    for size in SLOT_SIZES:
        assert {push["devices"] for push in received[f"shared_memory-slot{size}"]} == {size}


@pytest.mark.parametrize("t", TOPOLOGIES, ids=by_name)
def test_every_rank_hears_the_same_numbers_of_committed_pushes(t: Topology, facts: dict[str, Facts]) -> None:
    for transport in TRANSPORT_NAMES:
        told = [rank["hook"]["pushed"][transport] for rank in facts[t.name]]
        assert [rank["status"] for rank in told] == [["COMMITTED"] * PUSHES] * RANKS
        assert [rank["numbers"] for rank in told] == [told[0]["numbers"]] * RANKS
        assert told[0]["numbers"] == sorted(set(told[0]["numbers"]))


@pytest.mark.parametrize("t", WITH_LOGITS, ids=by_name)
def test_what_the_ranks_hold_means_to_megatron_what_it_means_to_transformers(
    t: Topology, facts: dict[str, Facts]
) -> None:
    errors = [rank["logit_error"] for rank in facts[t.name] if rank["logit_error"] is not None]
    assert [rank["logit_failure"] for rank in facts[t.name]] == [None] * RANKS
    assert errors
    assert max(errors) <= LOGIT_TOLERANCE


@pytest.mark.parametrize("t", TOPOLOGIES, ids=by_name)
def test_memory_beside_the_model_is_a_few_parameters(t: Topology, facts: dict[str, Facts]) -> None:
    """The embedding is the largest tensor of these models; fused projections are up to twice an unfused tensor."""
    for rank in facts[t.name]:
        assert rank["peak_bytes"] <= MEMORY_IN_PARAMETERS * rank["largest_bytes"]


@pytest.mark.parametrize("t", WITH_EXPERTS, ids=by_name)
def test_memory_beside_the_model_is_less_than_one_layer_with_experts(t: Topology, facts: dict[str, Facts]) -> None:
    for rank in facts[t.name]:
        assert rank["expert_peak_bytes"] < rank["layer_bytes"] / 2


def test_a_stage_without_parameters_of_its_own_yields_all_tensors_too(facts: dict[str, Facts]) -> None:
    """The last stage of a tied model with the output layer alone has a norm; every stage but the first no embedding."""
    (layout,) = [t for t in TOPOLOGIES if t.layout]
    counts = [rank["parameters"] for rank in facts[layout.name]]
    assert min(counts) < max(counts)
    assert len({rank["names"] for rank in facts[layout.name]}) == 1

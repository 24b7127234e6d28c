"""ModuleSource on two ranks whose modules torch has sharded: FSDP2, DTensors by hand, DDP; over gloo."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.rank_job import run_ranks

SHARDED = ["fsdp2", "dtensor"]
KINDS = ["plain", "ddp", *SHARDED]

Facts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    out = tmp_path_factory.mktemp("sharded")
    module = ["tests.support.sharded_job", str(out / "rendezvous"), str(out)]
    run_ranks(module, 2, {"CUDA_VISIBLE_DEVICES": ""})
    return [json.loads((out / f"rank{r}.json").read_text()) for r in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_yields_every_parameter_whole_as_torch_itself_has_it(kind: str, facts: Facts) -> None:
    plain = facts[0]["plain"]["yielded"]
    for rank in facts:
        assert rank[kind]["yielded"] == plain
        assert rank[kind]["state"] == plain


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_and_ties_are_those_of_the_whole_module_on_every_rank(kind: str, facts: Facts) -> None:
    plain = facts[0]["plain"]
    for rank in facts:
        assert (rank[kind]["metadata"], rank[kind]["ties"]) == (plain["metadata"], plain["ties"])
        assert rank[kind]["ties"] == [["head.weight", "embed.weight"]]
        assert ["embed.weight", "torch.float32", [11, 6]] in rank[kind]["metadata"]


def test_what_fsdp2_computes_with_is_not_what_is_sent(facts: Facts) -> None:
    """After a forward pass its outermost parameters are still gathered, and in bfloat16."""
    for rank in facts:
        assert "embed.weight" in rank["fsdp2"]["unsharded_by_forward"]
        assert rank["fsdp2"]["after_forward"] == rank["plain"]["yielded"]


def test_what_was_trained_is_sent_and_the_export_in_between_did_not_disturb(facts: Facts) -> None:
    first, second = (rank["fsdp2"] for rank in facts)
    assert first["trained"] == second["trained"] == first["trained_state"] == second["trained_state"]
    changed = {name for name, digest in first["trained"].items() if digest != first["yielded"][name]}
    assert changed == set(first["yielded"])


def test_flat_parameters_of_fsdp1_are_refused(facts: Facts) -> None:
    for rank in facts:
        assert "fully_shard instead" in rank["fsdp1"]["refused"]

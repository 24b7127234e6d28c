"""The sweep's table of topologies is whole, and says what went wrong in one line."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from tests.support.staging import stage
from tests.sweep.pushes import PUSHES
from tests.sweep.receiving import compare, slots, turn_signs
from tests.sweep.run import line, problem_of
from tests.sweep.topology import Topology, every


@pytest.mark.parametrize(("ranks", "count"), [(1, 2), (2, 16), (4, 70), (8, 222)])
def test_every_way_to_split_a_model_is_there_once(ranks: int, count: int) -> None:
    topologies = list(every(ranks))
    assert len(topologies) == len({t.name for t in topologies}) == count
    for t in topologies:
        assert t.tensor * t.pipeline * t.context * t.data == ranks
        assert ranks % (t.expert_tensor * t.expert * t.pipeline) == 0
        assert t.virtual_pipeline == 1 or t.pipeline > 1
        assert t.expert == 1 or t.has_experts


def test_four_ranks_meet_every_family_tied_and_untied_in_both_dtypes() -> None:
    models = {(t.family, t.tied, t.dtype) for t in every(4)}
    assert len(models) == 6 * 2 * 2


def facts(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "failure": None,
        "wrong": [],
        "missing": [],
        "metadata_agrees": True,
        "names": 7,
        "logit_error": 1e-6,
    }
    return good | {"build_seconds": 1.0, "export_seconds": 0.5} | changes


TOPOLOGY = Topology(2, "llama", tied=True, tensor=2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"logit_error": None}, None),
        ({"failure": "Traceback\nValueError: no"}, "rank 1: ValueError: no"),
        ({"wrong": ["w"]}, "rank 1: wrong ['w'], missing []"),
        ({"missing": ["w"]}, "rank 1: wrong [], missing ['w']"),
        ({"metadata_agrees": False}, "rank 1: wrong [], missing []"),
        ({"logit_error": 0.1}, "logits differ from transformers' by 1.0e-01"),
        ({"logit_error": float("nan")}, "logits differ from transformers' by nan"),
    ],
)
def test_one_rank_that_differs_is_the_topologys_problem(changes: dict[str, Any], problem: str | None) -> None:
    ranks = [facts(), facts(**changes)]
    assert problem_of(ranks) == problem
    assert (problem or "bit for bit") in line(TOPOLOGY, ranks, problem)


def pushed(*, status: str = "COMMITTED", pushes: int = PUSHES, way: str = "inline", **got: list[str]) -> dict[str, Any]:
    received = [{"wrong": [], "missing": [], "tensors": 7, "devices": 1} | got] * pushes
    told = {"inline": {"status": [status] * PUSHES, "seconds": 0.25, "ways": {"inline-slot1": way}}}
    return {"hook": {"pushed": told, "received": {"inline-slot2": received, "inline-slot1": received}}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"status": "DEGRADED"}, "rank 0: inline: ['DEGRADED', 'DEGRADED', 'DEGRADED']"),
        ({"way": "broadcast"}, "rank 0: inline: the plan took broadcast"),
        ({"pushes": 2}, "inline-slot2 got 2 pushes of 3"),
        ({"wrong": ["w for any device"]}, "inline-slot2, push 1: wrong ['w for any device'], missing []"),
        ({"missing": ["w"]}, "inline-slot2, push 1: wrong [], missing ['w']"),
    ],
)
def test_one_engine_that_got_something_else_is_the_topologys_problem(
    changes: dict[str, Any], problem: str | None
) -> None:
    ranks = [facts(**pushed(**changes)), facts()]
    assert problem_of(ranks) == problem
    assert (problem or "bit for bit on all ranks; inline to 1,2") in line(TOPOLOGY, ranks, problem)


STATE = {"a": torch.tensor([1.5, -2.0, 0.0]), "b": torch.ones(2, 2)}


def got_of(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a sweep's engine says of `state` when STATE was to come, under those names and one more."""
    digests = {n: hashlib.sha256(t.numpy().tobytes()).digest() for n, t in STATE.items()}
    with stage(state, "3") as staged:
        return compare(staged, digests, [*STATE, "c"])


def test_an_engine_of_a_sweep_tells_a_single_changed_bit_and_a_missing_name() -> None:
    assert got_of(STATE) == {"wrong": [], "missing": ["c"], "tensors": 2, "devices": 1, "number": 3}
    changed = got_of(STATE | {"a": torch.tensor([1.5, -2.0, -0.0])})
    assert changed["wrong"] == ["a for any device"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_signs_are_what_negation_makes(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.5, -2.0, 0.0, -0.0, float("inf")], dtype=dtype)
    data, turned = (t.view(torch.uint8).numpy().tobytes() for t in (tensor, -tensor))
    assert turn_signs(data, dtype.itemsize) == turned != data


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_slots_are_of_every_size_and_in_the_middle(ranks: int) -> None:
    assert [(size, len(slot)) for size, slot in slots(ranks).items()] == [(s, s) for s in (1, 2, 4, 8) if s <= ranks]
    assert slots(4)[2] == (1, 2)


def test_a_name_tells_only_what_is_split() -> None:
    assert TOPOLOGY.name == "tp2-llama-tied-float32"
    assert Topology(4, "mixtral", False, "bfloat16", expert=2).name == "dp4-ep2-mixtral-untied-bfloat16"

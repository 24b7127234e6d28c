"""The sweep's table of topologies is whole, and says what went wrong in one line."""

from __future__ import annotations

from typing import Any

import pytest

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


def test_a_name_tells_only_what_is_split() -> None:
    assert TOPOLOGY.name == "tp2-llama-tied-float32"
    assert Topology(4, "mixtral", False, "bfloat16", expert=2).name == "dp4-ep2-mixtral-untied-bfloat16"

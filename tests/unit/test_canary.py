"""Which engines are doubted by what they say, and what follows from it in a fleet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.coordinator.views import fleet_state
from controlplane.core.canary import Canary, CanaryReference, Verification, difference, judge
from controlplane.core.fleet import FleetCore, FleetSettings
from controlplane.core.fleet_book import Doubt
from controlplane.core.fleet_doubts import judge_all
from controlplane.core.fleet_records import Recovered
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, WeightVersion

RIGHT, WRONG = (-1.0, -2.0), (-1.0, -2.5)


def said(**by_name: tuple[float, ...]) -> dict[EngineId, Canary]:
    return {EngineId(name): Canary(logprobs) for name, logprobs in by_name.items()}


def test_the_one_that_says_something_else_than_two_is_doubted_with_the_difference() -> None:
    doubted = judge(said(a=RIGHT, b=WRONG, c=RIGHT), 0.05)
    assert doubted is not None
    assert list(doubted) == ["b"]
    assert "2 of 3 equal engines by up to 0.5 (tolerance 0.05)" in doubted[EngineId("b")]


@pytest.mark.parametrize(
    "engines",
    [
        said(a=RIGHT, b=WRONG),
        said(a=RIGHT, b=WRONG, c=(-9.0, -9.0)),
        said(a=RIGHT, b=RIGHT, c=WRONG, d=WRONG),
    ],
    ids=["two", "three that differ", "two against two"],
)
def test_without_a_strict_majority_of_at_least_three_nobody_is_doubted(engines: dict[EngineId, Canary]) -> None:
    assert judge(engines, 0.05) is None


def test_a_majority_that_agrees_doubts_nobody() -> None:
    assert judge(said(a=RIGHT, b=RIGHT, c=(-1.01, -2.02)), 0.05) == {}


def test_an_answer_of_another_length_is_no_answer() -> None:
    assert difference((1.0,), (1.0, 2.0)) == float("inf")
    doubted = judge(said(a=RIGHT, b=RIGHT, c=(-1.0,)), 0.05)
    assert doubted is not None
    assert list(doubted) == ["c"]


def test_what_is_no_number_agrees_with_nothing() -> None:
    assert difference((-1.0, -2.0), (-1.0, float("nan"))) == float("inf")
    doubted = judge(said(a=RIGHT, b=RIGHT, c=(-1.0, float("nan"))), 0.05)
    assert doubted is not None
    assert list(doubted) == ["c"]


def test_decoded_tokens_are_not_compared() -> None:
    engines = said(a=RIGHT, b=RIGHT, c=RIGHT)
    engines[EngineId("c")] = replace(engines[EngineId("c")], tokens=(1, 2))
    assert judge(engines, 0.05) == {}


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        (CanaryReference((1,), (), 0.1), "1 tokens"),
        (CanaryReference((1, 2, 3), (-1.0,), 0.1), "1 log probabilities for 3 tokens"),
        (CanaryReference((1, 2), (-1.0,), 0.0), "tolerance is 0.0"),
        (CanaryReference((1, 2), (-1.0,), float("inf")), "tolerance is inf"),
        (CanaryReference((1, 2, 3), (-1.0, float("nan")), 0.1), "not finite"),
        (CanaryReference(tuple(range(65)), (0.0,) * 64, 0.1), "65 tokens"),
    ],
)
def test_a_reference_that_nothing_can_be_compared_with_says_why(reference: CanaryReference, problem: str) -> None:
    assert problem in reference.problem()


def test_a_reference_is_met_within_its_tolerance_only() -> None:
    reference = CanaryReference((1, 2, 3), RIGHT, 0.1)
    assert reference.problem() == ""
    assert reference.disagreement((-1.05, -2.05)) == ""
    assert "by up to 0.5 (tolerance 0.1)" in reference.disagreement(WRONG)


def test_a_verification_is_one_of_three_words() -> None:
    assert [v.value for v in Verification] == ["unverified", "majority", "reference"]


def test_a_doubt_of_an_engine_that_left_is_over() -> None:
    settings = FleetSettings(run_id=RunId("r"))
    core = FleetCore(settings, Recovered(coordinator_term=Term(1)), 0.0)
    gone = EngineId("gone")
    core.doubts[gone] = Doubt(Incarnation("i"), WeightVersion(1, Term(1)), "it differs")
    assert fleet_state(core).models == []
    judge_all(core, ModelName("policy"), 1.0)
    assert core.doubts == {}

"""Judging engines by their canaries costs a report nothing while all agree, and misses nobody who is contradicted."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_engines
from controlplane.core.canary import AT_LEAST, MAX_CANDIDATES, Canary, Verification, difference, judge
from controlplane.core.engine_state import Unset
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId
from tests.support.singers import ANSWERS, Singers

TOLERANCE = 0.05


def plain_judge(said: dict[EngineId, Canary], tolerance: float) -> set[EngineId] | None:
    """By the definition: every pair is compared."""
    sides = {
        name: {o for o, c in said.items() if difference(canary.prompt_logprobs, c.prompt_logprobs) <= tolerance}
        for name, canary in said.items()
    }
    middle = min(sides, key=lambda name: (-len(sides[name]), name))
    return None if 2 * len(sides[middle]) <= len(said) else said.keys() - sides[middle]


@given(st.lists(st.sampled_from([-1.0, -1.03, -1.06, -1.5, math.nan]), min_size=AT_LEAST, max_size=9))
def test_a_judgement_is_that_of_all_pairs(numbers: list[float]) -> None:
    said = {EngineId(f"e{i}"): Canary((number,)) for i, number in enumerate(numbers)}
    found = judge(said, TOLERANCE)
    assert (None if found is None else found.keys()) == plain_judge(said, TOLERANCE)


def test_the_one_wrong_of_a_thousand_that_all_differ_a_little_is_found() -> None:
    noise = random.Random(0)
    said = {EngineId(f"e{i}"): Canary((-1.0 + noise.uniform(-0.02, 0.02),) * 8) for i in range(10 * MAX_CANDIDATES)}
    said[EngineId("e77")] = Canary((-1.3,) * 8)
    assert list(judge(said, TOLERANCE) or ()) == ["e77"]


@pytest.mark.parametrize("position", range(5))
def test_whom_the_others_contradict_is_doubted_before_the_decision_whenever_it_speaks(position: int) -> None:
    f = Singers(5)
    update = f.go("u1")
    names = [f"e{i}" for i in range(1, 5)]
    names.insert(position, "e0")
    for name in names:
        f.say(name, update, "wrong" if name == "e0" else "right")
    assert list(f.core.doubts) == ["e0"]
    assert update.phase is Phase.DEGRADED
    assert update.outcomes[EngineId("e0")].error_reason == "CANARY_DISAGREES"


def test_while_all_agree_nobody_is_judged_before_the_decision_and_all_are_verified_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    f = Singers(12)
    judged: list[object] = []

    def note(*given: object) -> list[fx.Effect]:
        judged.append(given)
        return []

    monkeypatch.setattr(fleet_engines, "judge_all", note)
    for update_id in ("u1", "u2"):
        update = f.go(update_id)
        for name in f.by_name:
            f.report(f.by_name[name], name, weights=Unset(), canary=None)
            f.say(name, update, "right" if name != "e3" else "near")
        assert update.phase is Phase.COMMITTED
        assert {o.verification for o in update.outcomes.values()} == {Verification.MAJORITY}
    assert judged == []


Sayings = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([*ANSWERS, "unset", "silent"])), max_size=24)


@given(Sayings)
def test_a_report_that_is_not_judged_would_have_doubted_nobody(sayings: list[tuple[int, str]]) -> None:
    """Two coordinators hear the same; one of them judges all engines at every report."""
    lazy, eager = Singers(5), Singers(5)
    numbers = itertools.count(1)
    updates = [f.go(f"u{next(numbers)}") for f in (lazy, eager)]
    for i, word in sayings:
        name = f"e{i}"
        with pytest.MonkeyPatch.context() as patch:
            for f, update in zip((lazy, eager), updates, strict=True):
                if f is eager:
                    patch.setattr(fleet_engines, "to_be_judged", lambda *given: True)
                if word == "unset":
                    f.report(f.by_name[name], name, weights=Unset(), canary=None)
                elif word == "silent":
                    f.core.silence(f.core.engines[EngineId(name)])
                else:
                    f.say(name, update, word)
        assert lazy.core.doubts == eager.core.doubts
        assert updates[0].phase is updates[1].phase

"""The spans are true (INV-11): 64 samples at once on two real engines, ten updates under them, every span recomputed.

Each span's log probabilities are those of its own version's weights, and of no neighbour's: a border that lay one
update off, or a token that was stamped too late, would be seen. What the policy on lag dropped is all that is lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from controlplane.rollout.lag_guard import LagGuard
from controlplane.rollout.sample import Sample
from tests.support.told_rank import Order
from tests.support.two_real_engines import ENGINES, TOLERANCE, RealFleet, Recomputed, two_real_engines

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1200)]

SAMPLES = 64
"""At once, all the time."""
UPDATES = 10
LENGTH = 400
MAX_LAG = 2
TELLING = 5
"""Tokens of a span that must tell neighbours apart; fewer may be likely under both."""
MARGIN = 10.0
"""How many tolerances neighbours must be apart, at least."""


@dataclass(frozen=True)
class Made:
    """A sample that was asked for, and what the policy made of it."""

    prompt: list[int]
    sample: Sample
    commits: int
    """Of the fleet, as this client knew when the sample was judged."""
    admitted: bool


@dataclass
class Load:
    """Samples that run all the time until told that it is over; those under way then go to their end."""

    rollouts: RolloutClient
    guard: LagGuard
    asked: int = 0
    made: list[Made] = field(default_factory=list)
    over: bool = False

    async def one_after_the_other(self, prompt: list[int]) -> None:
        sampling = SamplingSettings(max_tokens=LENGTH, temperature=1.0, ignore_eos=True)
        while not self.over:
            self.asked += 1
            sample = await self.rollouts.generate(prompt, sampling)
            commits = self.rollouts.commits.ordinal
            self.made.append(Made(prompt, sample, commits, self.guard.admit(sample) is not None))


async def test_inv11_each_span_of_64_samples_over_ten_updates_is_its_own_versions_and_no_neighbours(
    tmp_path: Path,
) -> None:
    async with two_real_engines(tmp_path) as real, real.client() as rollouts:
        numbers = [await real.push(Order(seed=100))]
        await real.routable(*ENGINES)
        load = Load(rollouts, LagGuard(rollouts.commits, MAX_LAG))
        async with asyncio.TaskGroup() as group:
            for i in range(SAMPLES):
                group.create_task(load.one_after_the_other([5 + i, 6, 7]))
            numbers += [await real.push(Order(seed=100 + i)) for i in range(1, UPDATES + 1)]
            load.over = True
    assert numbers == list(range(1, UPDATES + 2))
    _nothing_is_lost(load)
    _the_policy_dropped_just_what_is_too_old(load)
    print("\n" + _spans_are_true(real, load.made))


def _nothing_is_lost(load: Load) -> None:
    guard = load.guard
    assert load.asked == len(load.made) == guard.admitted + guard.dropped.total()
    assert {(made.sample.finish_reason, len(made.sample.tokens)) for made in load.made} == {("length", LENGTH)}
    assert {made.sample.engine_id for made in load.made} == set(ENGINES)
    tokens = sum(guard.lags.values())
    assert tokens == LENGTH * guard.admitted


def _the_policy_dropped_just_what_is_too_old(load: Load) -> None:
    """Version n is the fleet's commit n here: nothing was burned."""
    dropped = Counter(("lag", made.sample.spans[0].version.number) for made in load.made if not made.admitted)
    assert dropped == load.guard.dropped
    for made in load.made:
        assert made.admitted == (made.commits - made.sample.spans[0].version.number <= MAX_LAG)
    assert dropped, "no sample was too old: the policy was not tried"


def _spans_are_true(real: RealFleet, made: Sequence[Made]) -> str:
    """What was found, as a summary."""
    truth = Recomputed(real)
    text = [*made[0].prompt, *made[0].sample.tokens]
    for number in sorted(real.orders)[1:]:
        apart = truth.apart(number - 1, number, text)
        assert apart[len(apart) // 2] >= MARGIN * TOLERANCE, f"{number - 1} and {number} are too much alike"
    own, other = [], []
    for m in made:
        for span in m.sample.spans:
            own.append(truth.gap(span.version.number, m.prompt, m.sample, span))
            if span.end - span.start >= TELLING:
                near = truth.neighbours(span.version.number)
                other += [truth.gap(number, m.prompt, m.sample, span) for number in near]
    assert max(own) < TOLERANCE
    assert min(other) >= MARGIN * TOLERANCE
    several = [m.sample for m in made if len(m.sample.spans) > 1]
    assert len(several) >= SAMPLES, "too few samples were cut by an update"
    most = max(len(m.sample.spans) for m in made)
    return (
        f"{len(made)} samples, {sum(m.admitted for m in made)} of them admitted; {len(own)} spans; "
        f"{len(several)} samples have more than one, the most {most}\n"
        f"own version: at most {max(own):.1e} off (tolerance {TOLERANCE})\n"
        f"a neighbour's: at least {min(other):.2f} off, in {len(other)} comparisons"
    )

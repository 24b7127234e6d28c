"""An engine dies with samples in it, on real vLLM: they go on at the other engine from the tokens that they have.

Each run has 32 samples, and an update in the middle of them. What was said by whom is recomputed (INV-11); the seconds
lost are printed, against the same run undisturbed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from controlplane.rollout.sample import Sample
from tests.support.eventually import eventually
from tests.support.told_rank import Order
from tests.support.two_real_engines import ENGINES, TOLERANCE, RealFleet, Recomputed, two_real_engines

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1200)]

SAMPLES = 32
LENGTH = 400
STRUCK_AFTER = LENGTH // 4
"""Tokens that the samples have when the blow falls, about."""
LEFT = ENGINES[1]


@dataclass(frozen=True)
class Run:
    what: str
    samples: list[tuple[list[int], Sample]]
    """With their prompts."""
    seconds: float
    """From the first request to the end of the last sample."""
    moved: int
    """Samples that were in the engine that died."""


async def run(
    real: RealFleet, rollouts: RolloutClient, what: str, seed: int, strike: Callable[[], None] | None = None
) -> Run:
    """32 samples over both engines; the blow, and then a push, once they have some tokens."""
    await eventually(lambda: knows_of(rollouts) == set(ENGINES))  # the first engine of a version is told before others
    began = time.monotonic()
    prompts = [[5 + i, 6, 7] for i in range(SAMPLES)]
    tasks = [asyncio.create_task(sample(rollouts, prompt, LENGTH)) for prompt in prompts]
    ends: list[float] = []
    for task in tasks:
        task.add_done_callback(lambda _: ends.append(time.monotonic()))
    await sample(rollouts, [3, 4], STRUCK_AFTER)  # of the same pace
    moved = (await real.fleet.status(ENGINES[0])).live_requests
    if strike is not None:
        strike()
        await real.unrouted(ENGINES[0])  # else the push would wait for an engine that is gone
    await real.push(Order(seed))
    made = await asyncio.gather(*tasks)
    return Run(what, list(zip(prompts, made, strict=True)), max(ends) - began, moved)


def knows_of(rollouts: RolloutClient) -> set[str]:
    return {route.engine_id for route in rollouts.routes.routes} if rollouts.routes is not None else set()


async def sample(rollouts: RolloutClient, prompt: list[int], length: int) -> Sample:
    return await rollouts.generate(prompt, SamplingSettings(max_tokens=length, temperature=1.0, ignore_eos=True))


async def whole_again(real: RealFleet, seed: int) -> None:
    """The engine that died is back, and has what the fleet serves."""
    await real.known(len(ENGINES))
    await real.push(Order(seed))
    await real.routable(*ENGINES)


async def test_inv11_all_samples_of_a_killed_engine_finish_elsewhere_and_their_spans_are_true(tmp_path: Path) -> None:
    async with two_real_engines(tmp_path) as real, real.client(on_loss="resume") as rollouts:
        await whole_again(real, seed=200)
        undisturbed = await run(real, rollouts, "undisturbed", 201)
        await real.routable(*ENGINES)
        runs = [
            undisturbed,
            await run(real, rollouts, "EngineCore killed", 202, lambda: os.kill(real.core_of("e0"), signal.SIGKILL)),
        ]
        await whole_again(real, seed=203)
        runs.append(await run(real, rollouts, "agent killed", 204, real.agents["e0"].kill))
        await real.agents["e0"].wait()
        await real.start("e0")
        await whole_again(real, seed=205)
    print("\n" + "\n".join(judged(real, runs)))


def judged(real: RealFleet, runs: list[Run]) -> list[str]:
    """A line for each run."""
    truth = Recomputed(real)
    return [judge(truth, one, runs[0].seconds) for one in runs]


def judge(truth: Recomputed, one: Run, undisturbed: float) -> str:
    assert one.moved >= SAMPLES // 4, "too few samples were in the engine that was struck"
    assert all(len(s.tokens) == LENGTH and s.finish_reason == "length" for _, s in one.samples)
    spans = [(prompt, s, span) for prompt, s in one.samples for span in s.spans]
    several = sum(len(s.spans) > 1 for _, s in one.samples)
    assert several, "no sample was under way at the update"
    own = max(truth.gap(span.version.number, prompt, s, span) for prompt, s, span in spans)
    assert own < TOLERANCE
    for prompt, s, span in spans:
        if span.end - span.start >= 5:
            near = truth.neighbours(span.version.number)
            assert min(truth.gap(number, prompt, s, span) for number in near) > 10 * TOLERANCE
    elsewhere = {s.engine_id for _, s in one.samples}
    assert elsewhere == (set(ENGINES) if one.what == "undisturbed" else {LEFT})
    return (
        f"{one.what}: {len(one.samples)} samples, {one.moved} requests in e0, {several} with more than one span, "
        f"own version at most {own:.1e} off; {one.seconds:.1f} s, {one.seconds - undisturbed:+.1f} s"
    )

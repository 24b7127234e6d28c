"""GRPO whose rollouts overlap its training, and are never further behind the learner than a lag allows.

    python -m examples.run async_grpo                    # on this machine, a tiny model
    python -m examples.run async_grpo --model smollm2    # 9 minutes on two busy cores

While the ranks train on one batch, the engines make the next one with the version before. `push_async` returns when the
weights were read, and training goes on while engines install. What each token was made by is known, so the lag is
counted and not guessed: at the end it prints a histogram, how much of the training had rollouts in flight, and the
reward on prompts that are never trained on, before and after.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from controlplane.core.versions import WeightVersion
from examples.async_rollouts import Account, AsyncRollouts, Batch, Wanted
from examples.policy import Options, Policy, build, held_out, is_first, learn, mean, parse, say
from trainer_agent.demo.rollout_worker import Rollout
from trainer_agent.demo.stopwatch import Stopwatch
from trainer_agent.first_rank import from_first
from weightplane import TrainerRank

STEPS = 8
MAX_LAG = 1

Stretch = tuple[float, float]


def train(options: Options) -> None:
    policy, trained = build(options), list[Stretch]()
    with ExitStack() as stack:
        rank = stack.enter_context(TrainerRank.join(source=policy.source))
        version = rank.push(0).version
        wanted = Wanted(version, policy.task.prompts.training, options.seed, MAX_LAG)
        # In a process of its own: no gRPC in this one, which may fork.
        rollouts = stack.enter_context(AsyncRollouts(wanted)) if is_first() else None
        before = evaluate(policy, rollouts, version)
        began, pending = time.monotonic(), None
        for step in range(1, options.steps + 1):
            rank.set_step(step)
            watch = Stopwatch()
            with rank.phase("rollout"):
                batch = from_first(Batch, lambda: rollouts.take() if rollouts else [])
            waited, start = watch.lap(), time.monotonic()
            with rank.phase("train"):
                reward = learn(policy, [rollout for group in batch for rollout in group])
            trained.append((start, time.monotonic()))
            learned = watch.lap()
            if pending is not None:
                pending.applied()  # the step before's, decided while this one trained; raises if it failed
            pending = rank.push_async(step)  # the weights were read; engines install while the next step trains
            if rollouts:
                rollouts.pushed()
            times = f"waited {waited:.1f} s  train {learned:.1f} s  push {watch.lap():.1f} s"
            say(f"step {step}/{options.steps}  reward {reward:.3f}  made by {makers(batch)}  {times}")
        seconds = time.monotonic() - began
        if pending is not None:
            version = pending.applied().version
        if rollouts:
            say("\n".join(report(rollouts.end(), trained, seconds)))
        after = evaluate(policy, rollouts, version)
        say(f"held-out reward {before:.3f} before, {after:.3f} after {options.steps} steps")


def evaluate(policy: Policy, rollouts: AsyncRollouts | None, version: WeightVersion) -> float:
    """Mean reward on prompts that are never trained on."""
    answers = from_first(list[Rollout], lambda: rollouts.answers(held_out(policy), version) if rollouts else [])
    return mean([policy.task.reward(answer.tokens) for answer in answers])


def makers(batch: Sequence[Sequence[Rollout]]) -> str:
    """Numbers of the versions that made it."""
    return ", ".join(map(str, sorted({number for group in batch for r in group for number in r.versions})))


def report(account: Account, trained: Sequence[Stretch], seconds: float) -> list[str]:
    """For people."""
    training, both = sum(end - start for start, end in trained), overlap(account.busy, trained)
    tokens = account.lags.total()
    return [
        f"{tokens} tokens trained on, in {seconds:.0f} s: {tokens / seconds:.0f} tokens/s",
        f"rollouts were in flight for {both:.1f} of {training:.1f} s of training ({both / training:.0%})",
        *histogram(account.lags),
        f"dropped as too old: {account.dropped.total()} samples; at most {MAX_LAG} behind is allowed",
    ]


def histogram(lags: Counter[int]) -> list[str]:
    """A line for each lag, with a bar of at most 40 signs."""
    shares = [(lag, tokens, tokens / lags.total()) for lag, tokens in sorted(lags.items())]
    return [f"lag {lag}: {'#' * round(40 * share):40} {tokens} tokens ({share:.0%})" for lag, tokens, share in shares]


def overlap(one: Sequence[Stretch], other: Sequence[Stretch]) -> float:
    """Seconds that lie in a stretch of each; those of one list do not overlap one another."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


if __name__ == "__main__":
    train(parse(__doc__, STEPS))

"""On-policy GRPO: push, roll out with just that version, learn, push again.

    python -m examples.run sync_grpo                    # on this machine, a tiny model
    python -m examples.run sync_grpo --model smollm2

On a fleet of your own, which `weightplane up fleet.toml` started:

    weightplane trainer --set nproc_per_node=2 -- -m examples.sync_grpo --model-dir models/my-model

The reward is that of `weightplane demo`, which runs the same loop with checkpoints, export and a check of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from controlplane.core.versions import WeightVersion
from examples.policy import (
    GROUP_SIZE,
    PROMPTS_PER_STEP,
    Options,
    Policy,
    build,
    held_out,
    is_first,
    learn,
    mean,
    parse,
    say,
)
from trainer_agent.demo.rollout_worker import Ask, Rollout, RolloutWorker
from trainer_agent.demo.stopwatch import Stopwatch
from trainer_agent.demo.task import draw_prompts, training_sampling
from trainer_agent.first_rank import from_first
from weightplane import TrainerRank

STEPS = 8


def train(options: Options) -> None:
    policy = build(options)
    rollouts = RolloutWorker() if is_first() else nullcontext()  # a process: no gRPC in this one, which may fork
    with TrainerRank.join(source=policy.source) as rank, rollouts as worker:
        version = rank.push(0).version  # the fleet's first version, before any rollout
        before = evaluate(policy, worker, version)
        say(f"held-out reward {before:.3f}")
        for step in range(1, options.steps + 1):
            rank.set_step(step)
            watch = Stopwatch()
            with rank.phase("rollout"):
                samples = roll_out(worker, asks(policy, options.seed + 1000 * step), version)
            made = watch.lap()
            with rank.phase("train"):
                reward = learn(policy, samples)
            learned = watch.lap()
            version = rank.push(step).version  # returns when the fleet decided
            times = f"rollout {made:.1f} s  train {learned:.1f} s  push {watch.lap():.1f} s"
            say(f"step {step}/{options.steps}  reward {reward:.3f}  version {version}  {times}")
        after = evaluate(policy, worker, version)
        say(f"held-out reward {before:.3f} before, {after:.3f} after {options.steps} steps")


def asks(policy: Policy, seed: int) -> list[Ask]:
    """GROUP_SIZE samples of each prompt, one after the other."""
    repeated = [prompt for prompt in draw_prompts(policy.task, PROMPTS_PER_STEP, seed) for _ in range(GROUP_SIZE)]
    return [Ask(prompt, training_sampling(seed + i)) for i, prompt in enumerate(repeated)]


def roll_out(worker: RolloutWorker | None, asked: Sequence[Ask], version: WeightVersion) -> list[Rollout]:
    """Begun with `version` or a later one; there is no later one while this trainer waits."""
    return from_first(list[Rollout], lambda: worker.generate(asked, version) if worker else [])


def evaluate(policy: Policy, worker: RolloutWorker | None, version: WeightVersion) -> float:
    """Mean reward on prompts that are never trained on."""
    answers = roll_out(worker, held_out(policy), version)
    return mean([policy.task.reward(answer.tokens) for answer in answers])


if __name__ == "__main__":
    train(parse(__doc__, STEPS))

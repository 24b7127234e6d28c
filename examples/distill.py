"""On-policy distillation: a frozen teacher scores what the student samples, and the student moves toward it.

    python -m examples.run distill

The fleet has two models. The teacher's engine serves what it loaded, as version 0, and refuses every update; the
student's is pushed to. Each token's advantage is how much more probable it is to the teacher than to the student that
sampled it, which descends the reverse KL. A score is of one version for the whole sample, and no logprob is made up:
what the teacher's engine leaves out is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

from controlplane.core.versions import WeightVersion
from examples.policy import PROMPTS_PER_STEP, Options, Policy, build, is_first, mean, parse, say
from trainer_agent.demo.objective import Batch, Trajectory, make_batch
from trainer_agent.demo.rollout_worker import Ask, Rollout, WorkerProcess, answer_all, gather_rollouts, roll_out
from trainer_agent.demo.stopwatch import Stopwatch
from trainer_agent.demo.task import draw_prompts, training_sampling
from trainer_agent.first_rank import from_first
from weightplane import TrainerRank

STEPS = 20
SAMPLES_OF_EACH = 8
TEACHER = "teacher"


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample of the student's, and what the teacher thinks of each of its tokens."""

    rollout: Rollout
    teacher_logprobs: tuple[float, ...]

    @property
    def gains(self) -> list[float]:
        """How much more probable each token is to the teacher; minus their mean estimates the reverse KL."""
        return [t - s for t, s in zip(self.teacher_logprobs, self.rollout.logprobs, strict=True)]


def train(options: Options) -> None:
    policy = build(options)
    worker = WorkerProcess(_serve) if is_first() else nullcontext()
    with TrainerRank.join(source=policy.source) as rank, worker as rollouts:
        version = rank.push(0).version
        held_out = [Ask(prompt, training_sampling(i)) for i, prompt in enumerate(policy.task.prompts.held_out)]
        before = kl(scored(rollouts, held_out, version))
        say(f"KL to the teacher {before:.3f} nats a token, on held-out prompts")
        for step in range(1, options.steps + 1):
            rank.set_step(step)
            watch = Stopwatch()
            with rank.phase("rollout"):
                samples = scored(rollouts, asks(policy, options.seed + 1000 * step), version)
            made = watch.lap()
            with rank.phase("train"):
                policy.learner.step(batch_of(policy, samples))
            learned = watch.lap()
            version = rank.push(step).version
            times = f"rollout and scores {made:.1f} s  train {learned:.1f} s  push {watch.lap():.1f} s"
            say(f"step {step}/{options.steps}  KL {kl(samples):.3f}  version {version}  {times}")
        after = kl(scored(rollouts, held_out, version))
        say(f"KL to the teacher {before:.3f} before, {after:.3f} after {options.steps} steps, on held-out prompts")


def asks(policy: Policy, seed: int) -> list[Ask]:
    prompts = draw_prompts(policy.task, PROMPTS_PER_STEP, seed) * SAMPLES_OF_EACH
    return [Ask(prompt, training_sampling(seed + i)) for i, prompt in enumerate(prompts)]


def scored(worker: WorkerProcess | None, asked: Sequence[Ask], version: WeightVersion) -> list[Scored]:
    """Samples of `version` or a later one, on every rank."""
    return from_first(list[Scored], lambda: worker.ask((asked, version)) if worker else [])


def kl(samples: Sequence[Scored]) -> float:
    """Reverse KL in nats a token, estimated on the student's own samples."""
    return -mean([gain for sample in samples for gain in sample.gains])


def batch_of(policy: Policy, samples: Sequence[Scored]) -> Batch:
    """As GRPO's, but that each token has an advantage of its own."""
    trajectories = [Trajectory(s.rollout.prompt, s.rollout.tokens, s.rollout.logprobs, 0.0) for s in samples]
    batch = make_batch(trajectories, [0.0] * len(samples), policy.longest, rows=len(samples))
    advantages = batch.advantages.clone()
    advantages[batch.mask.bool()] = advantages.new_tensor([gain for sample in samples for gain in sample.gains])
    return replace(batch, advantages=advantages)


# ---- the process that asks the engines ----------------------------------------------------------


def _serve(pipe: Connection, coordinator: str) -> None:
    asyncio.run(_answer(pipe, coordinator))


async def _answer(pipe: Connection, coordinator: str) -> None:
    from controlplane.rollout.client import RolloutClient

    async with RolloutClient(coordinator) as student, RolloutClient(coordinator, model=TEACHER) as teacher:

        async def score(rollout: Rollout) -> Scored:
            scores = await teacher.score((*rollout.prompt, *rollout.tokens))
            own = scores.logprobs[len(rollout.prompt) :]  # entry i belongs to token i
            return Scored(rollout, tuple(logprob for logprob in own if logprob is not None))

        async def answer(request: tuple[list[Ask], WeightVersion]) -> list[Scored]:
            rollouts = await gather_rollouts(partial(roll_out, student), *request)
            return list(await asyncio.gather(*map(score, rollouts)))

        await answer_all(pipe, answer)


if __name__ == "__main__":
    train(parse(__doc__, STEPS))

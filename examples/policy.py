"""What all examples train: a Megatron model, its optimizer, a step of GRPO, and the source that a push reads.

The ranks are the stages of one pipeline, on the CPU. Model, objective and task are the demo's
(`trainer_agent/demo`): GRPO's clipped loss, and a reward that anyone can check by reading the tokens.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_agent.demo.rollout_worker import Ask
from trainer_agent.demo.task import MAX_TOKENS, greedy_sampling

if TYPE_CHECKING:
    from trainer_agent.demo.learner import Learner
    from trainer_agent.demo.rollout_worker import Rollout
    from trainer_agent.demo.task import Task
    from trainer_agent.megatron.source import MegatronSource

PROMPTS_PER_STEP = 8
GROUP_SIZE = 8
"""Samples of each prompt."""
MICRO_BATCH = 8
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Ranks wait in a broadcast while rank 0 collects rollouts."""


@dataclass(frozen=True, slots=True)
class Options:
    """Of every example's command line."""

    model_dir: Path
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class Policy:
    """One rank's part of the model under training."""

    task: Task
    learner: Learner
    source: MegatronSource

    @property
    def longest(self) -> int:
        """Predicted tokens of the longest sample: what rows of a batch are padded to."""
        return self.task.prompts.longest + MAX_TOKENS - 1


def parse(description: str | None, steps: int, argv: Sequence[str] | None = None) -> Options:
    """`description`'s first line and the default of --steps are the example's."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--model-dir", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument("--steps", type=int, default=steps, help=f"default: {steps}")
    parser.add_argument("--seed", type=int, default=0)
    return Options(**vars(parser.parse_args(argv)))


def build(options: Options) -> Policy:
    """Join the other ranks and load the model. Collective; torchrun's variables say who is who."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")
    import torch
    import torch.distributed as dist

    from trainer_agent.demo.learner import Learner, LearnerSettings
    from trainer_agent.demo.task import task_for
    from trainer_agent.megatron.families import read_config
    from trainer_agent.megatron.source import MegatronSource

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    task = task_for(options.model_dir, read_config(options.model_dir)["vocab_size"])
    settings = LearnerSettings(task.learning_rate, micro_batch=MICRO_BATCH)
    learner = Learner(options.model_dir, settings, pipeline_parallel=dist.get_world_size())
    return Policy(task, learner, MegatronSource(learner.model, options.model_dir))


def learn(policy: Policy, samples: Sequence[Rollout]) -> float:
    """One step of GRPO over whole groups, which lie one after the other; the mean reward. Collective.

    The ratio is against the logprobs that the engine sampled with, whichever version that was.
    """
    from trainer_agent.demo.objective import Trajectory, group_advantages, make_batch

    rewards = [policy.task.reward(sample.tokens) for sample in samples]
    trajectories = [Trajectory(s.prompt, s.tokens, s.logprobs, r) for s, r in zip(samples, rewards, strict=True)]
    advantages = group_advantages(rewards, GROUP_SIZE)
    policy.learner.step(make_batch(trajectories, advantages, policy.longest, rows=len(samples)))
    return mean(rewards)


def held_out(policy: Policy) -> list[Ask]:
    """Greedy answers to prompts that are never trained on."""
    return [Ask(prompt, greedy_sampling()) for prompt in policy.task.prompts.held_out]


def is_first() -> bool:
    """This rank asks for rollouts and prints; the others get what it got."""
    return os.environ["RANK"] == "0"


def say(text: str) -> None:
    """Once, not on every rank."""
    if is_first():
        print(text, flush=True)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

"""The demo's training run, as every rank runs it: push, roll out, learn, push again.

The engines serve exactly what was pushed, and rollouts are pinned to the version just pushed, so each step learns
from samples of its own policy; `logprob_gap` in the events shows it: the largest difference between a token's logprob
in the engine that sampled it and in the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from controlplane.core.versions import WeightVersion
from trainer_agent.demo.checkpoints import Checkpoints
from trainer_agent.demo.events import Events
from trainer_agent.demo.learner import Learner, LearnerSettings
from trainer_agent.demo.objective import Batch, Trajectory, group_advantages, make_batch
from trainer_agent.demo.rollout_worker import Ask, Rollout, RolloutWorker
from trainer_agent.demo.settings import GrpoSettings
from trainer_agent.demo.stopwatch import Stopwatch
from trainer_agent.demo.task import MAX_TOKENS, Task, draw_prompts, greedy_sampling, task_for, training_sampling
from trainer_agent.first_rank import from_first
from trainer_agent.megatron.export import export_hf
from trainer_agent.megatron.families import read_config
from trainer_agent.megatron.source import MegatronSource

if TYPE_CHECKING:
    from trainer_agent.rank.trainer_rank import TrainerRank

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Ranks wait in a broadcast while rank 0 collects rollouts; an engine may be rebuilt meanwhile."""
STEP_SEED_STRIDE = 100_003
"""Seeds of one step's samples lie apart from another's."""
SHOWN_SAMPLES = 2
"""Texts of an evaluation that are put into its event."""


def train(settings: GrpoSettings) -> None:
    """One rank's life, from joining the process group to the exported weights. Every rank calls it."""
    from trainer_agent.rank.trainer_rank import TrainerRank

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    first = dist.get_rank() == 0
    task = task_for(settings.model_dir, read_config(settings.model_dir)["vocab_size"])
    learner = Learner(
        settings.model_dir,
        LearnerSettings(settings.learning_rate or task.learning_rate, micro_batch=settings.micro_batch),
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
    )
    source = MegatronSource(learner.model, settings.model_dir)
    with (
        Events(settings.events if first else None) as events,
        TrainerRank.join(source=source) as rank,
        RolloutWorker() if first else nullcontext() as worker,
    ):
        TrainingRun(settings, task, learner, source, rank, worker, events).run()
    dist.barrier()
    dist.destroy_process_group()


@dataclass(slots=True)
class TrainingRun:
    settings: GrpoSettings
    task: Task
    learner: Learner
    source: MegatronSource
    rank: TrainerRank
    worker: RolloutWorker | None
    """On rank 0 only."""
    events: Events
    checkpoints: Checkpoints = field(init=False)
    version: WeightVersion = field(init=False)
    """The version pushed last: what the engines serve."""

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.settings.checkpoint_dir)

    def run(self) -> None:
        done = self._resume()
        self._push(done)
        self._evaluate(done)
        for step in range(done + 1, self.settings.steps + 1):
            self._step(step)
            if step % self.settings.checkpoint_every == 0 and step < self.settings.steps:
                self._save(step)
        if self.settings.steps > done:
            self._evaluate(self.settings.steps)
            self._save(self.settings.steps)
        self._export()
        self.events.write("finished", step=max(done, self.settings.steps))

    def _resume(self) -> int:
        """Steps that an earlier life of this run has done."""
        with self.rank.phase("load"):
            restored = self.checkpoints.restore(self.learner)
        if restored is None:
            self.events.write("started", steps=self.settings.steps)
            return 0
        self.events.write("resumed", step=restored.step, was_pushed_as=restored.version.number)
        return restored.step

    def _push(self, step: int) -> float:
        report = self.rank.push(step)
        self.version = report.version
        self.events.write(
            "pushed",
            step=step,
            version=report.version.number,
            term=report.version.term,
            status=report.status,
            outcomes=report.outcomes,
            seconds=round(report.seconds, 3),
        )
        return round(report.seconds, 3)

    def _step(self, step: int) -> None:
        self.rank.set_step(step)
        self.events.write("step_started", step=step, version=self.version.number)
        watch = Stopwatch()
        with self.rank.phase("rollout"):
            rollouts = self._roll_out(self._training_asks(step))
        rewards = [self.task.reward(rollout.tokens) for rollout in rollouts]
        reward, rollout_seconds = _mean(rewards), watch.lap()
        self.events.write("rollout_done", step=step, seconds=rollout_seconds, reward=reward, **_origin(rollouts))
        with self.rank.phase("train"):
            result = self.learner.step(self._batch(rollouts, rewards))
        train_seconds = watch.lap()
        push_seconds = self._push(step)
        self.events.write(
            "step_done",
            step=step,
            version=self.version.number,
            reward=reward,
            loss=round(result.loss, 6),
            grad_norm=round(result.grad_norm, 4),
            logprob_gap=result.behaviour_gap,
            seconds={"rollout": rollout_seconds, "train": train_seconds, "push": push_seconds},
        )

    def _evaluate(self, step: int) -> None:
        """Greedy answers to the held-out prompts."""
        watch = Stopwatch()
        with self.rank.phase("evaluate"):
            rollouts = self._roll_out([Ask(prompt, greedy_sampling()) for prompt in self.task.prompts.held_out])
        reward = _mean([self.task.reward(rollout.tokens) for rollout in rollouts])
        shown = [self.task.text(r.prompt + r.tokens) for r in rollouts[:SHOWN_SAMPLES]]
        self.events.write(
            "evaluated", step=step, reward=reward, samples=shown, seconds=watch.lap(), **_origin(rollouts)
        )

    def _save(self, step: int) -> None:
        watch = Stopwatch()
        with self.rank.phase("checkpoint"):
            path = self.checkpoints.save(self.learner, step, self.version)
        self.events.write("saved", step=step, version=self.version.number, path=str(path), seconds=watch.lap())

    def _export(self) -> None:
        if self.settings.export_dir is None:
            return
        watch = Stopwatch()
        with self.rank.phase("export"):
            export_hf(self.source, self.settings.model_dir, self.settings.export_dir, write=dist.get_rank() == 0)
        self.events.write(
            "exported", version=self.version.number, path=str(self.settings.export_dir), seconds=watch.lap()
        )

    # ---- data -----------------------------------------------------------------------------------

    def _training_asks(self, step: int) -> list[Ask]:
        seed = self.settings.seed + step * STEP_SEED_STRIDE
        prompts = draw_prompts(self.task, self.settings.prompts_per_step, seed)
        repeated = [prompt for prompt in prompts for _ in range(self.settings.group_size)]
        return [Ask(prompt, training_sampling(seed + i)) for i, prompt in enumerate(repeated)]

    def _roll_out(self, asks: Sequence[Ask]) -> list[Rollout]:
        """Rank 0 asks the engines; every rank gets all rollouts."""
        return from_first(list[Rollout], lambda: self.worker.generate(asks, self.version) if self.worker else [])

    def _batch(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> Batch:
        advantages = group_advantages(rewards, self.settings.group_size)
        trajectories = [
            Trajectory(r.prompt, r.tokens, r.logprobs, reward) for r, reward in zip(rollouts, rewards, strict=True)
        ]
        length = self.task.prompts.longest + MAX_TOKENS - 1
        return make_batch(trajectories, advantages, length, rows=len(trajectories))


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def _origin(rollouts: Sequence[Rollout]) -> dict[str, object]:
    """Which versions and engines made them."""
    engines = sorted({r.engine for r in rollouts})
    return {
        "versions": sorted({version for r in rollouts for version in r.versions}),
        "engines": {engine: sum(r.engine == engine for r in rollouts) for engine in engines},
    }

"""The rollouts' side of `async_grpo`: a process beside the first rank, in which the gRPC client lives.

It goes on making rollouts while the ranks train, and hands out what the lag allows. See `RolloutsAhead`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from controlplane.core.versions import WeightVersion
from examples.policy import GROUP_SIZE, PROMPTS_PER_STEP
from trainer_agent.demo.rollout_worker import (
    Ask,
    Rollout,
    WorkerProcess,
    answer_all,
    gather_rollouts,
    roll_out,
    rollout_of,
)
from trainer_agent.demo.task import training_sampling

if TYPE_CHECKING:
    from controlplane.rollout.ahead import Group

WAIT_SECONDS = 120.0
"""For an engine: long enough for one that is started anew."""

Batch = list[list[Rollout]]
"""Groups of samples; those of a group have one prompt."""


@dataclass(frozen=True, slots=True)
class Account:
    """What came of the rollouts."""

    busy: list[tuple[float, float]]
    """Stretches in which samples were in flight, on this machine's monotonic clock."""
    lags: Counter[int]
    """Tokens trained on, by how many commits they were behind the learner."""
    dropped: Counter[tuple[str, int | None]]
    """Samples, by reason and version."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What rollouts to make."""

    version: WeightVersion
    """The learner's weights, which the fleet committed."""
    prompts: tuple[tuple[int, ...], ...]
    seed: int
    max_lag: int


class AsyncRollouts(WorkerProcess):
    """Held by the first rank."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(_serve, wanted)

    def take(self) -> Batch:
        """What to train on next."""
        batch: Batch = self.ask("take")
        return batch

    def pushed(self) -> None:
        """The learner has begun a push."""
        self.ask("pushed")

    def answers(self, asks: Sequence[Ask], version: WeightVersion) -> list[Rollout]:
        """To evaluate with: of `version`."""
        answers: list[Rollout] = self.ask(("answers", asks, version))
        return answers

    def end(self) -> Account:
        """No more rollouts are begun."""
        account: Account = self.ask("end")
        return account


def _serve(pipe: Connection, coordinator: str, wanted: Wanted) -> None:
    asyncio.run(_answer(pipe, coordinator, wanted))


async def _answer(pipe: Connection, coordinator: str, wanted: Wanted) -> None:
    from controlplane.rollout.ahead import RolloutsAhead  # gRPC: not above, where the ranks import this module
    from controlplane.rollout.client import RolloutClient
    from controlplane.rollout.lag_guard import LagGuard

    prompts, sampling = shuffled(wanted.prompts, wanted.seed), training_sampling(wanted.seed)
    async with RolloutClient(coordinator, wait_seconds=WAIT_SECONDS, on_loss="resume") as client:
        guard = LagGuard(client.commits, wanted.max_lag)
        ahead = RolloutsAhead(
            client, guard, wanted.version, prompts, sampling, group_size=GROUP_SIZE, groups=PROMPTS_PER_STEP
        )

        async def answer(request: Any) -> Any:
            match request:
                case "take":
                    return [rollouts_of(group) for group in await ahead.take()]
                case "pushed":
                    return ahead.pushed()
                case "answers", asks, version:
                    return await gather_rollouts(partial(roll_out, client), asks, version)
                case "end":
                    await ahead.close()
                    return Account(ahead.busy, guard.lags, guard.dropped)
                case _:
                    raise ValueError(f"nobody asks for {request!r}")

        async with ahead:
            await answer_all(pipe, answer)


def shuffled(prompts: Sequence[tuple[int, ...]], seed: int) -> Iterator[tuple[int, ...]]:
    """All of them, in another order each time, for ever."""
    for epoch in itertools.count():
        yield from random.Random(seed + epoch).sample(prompts, len(prompts))


def rollouts_of(group: Group) -> list[Rollout]:
    return [rollout_of(group.prompt, admitted.sample) for admitted in group.samples]

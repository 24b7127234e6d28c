"""The rollouts' side of `async_grpo`: a process beside the first rank, in which the gRPC client lives.

It goes on making rollouts while the ranks train, and hands out what the lag allows. See `RolloutsAhead`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
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
    from controlplane.rollout.ahead import Group, RolloutsAhead
    from controlplane.rollout.client import RolloutClient

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
    dropped: Counter[tuple[str, int]]
    """Samples, by reason and version."""


class AsyncRollouts(WorkerProcess):
    """Held by the first rank."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], seed: int, max_lag: int) -> None:
        super().__init__(_serve, prompts, seed, max_lag)

    def begin(self, version: WeightVersion) -> None:
        """The learner's weights are this version, which the fleet committed: rollouts may begin."""
        self.ask(("begin", version))

    def take(self) -> Batch:
        """What to train on next."""
        batch: Batch = self.ask(("take",))
        return batch

    def pushed(self) -> None:
        """The learner has begun a push."""
        self.ask(("pushed",))

    def answers(self, asks: Sequence[Ask], version: WeightVersion) -> list[Rollout]:
        """To evaluate with: of `version`."""
        answers: list[Rollout] = self.ask(("answers", asks, version))
        return answers

    def end(self) -> Account:
        """No more rollouts are begun."""
        account: Account = self.ask(("end",))
        return account


def _serve(pipe: Connection, coordinator: str, prompts: Sequence[tuple[int, ...]], seed: int, max_lag: int) -> None:
    asyncio.run(_answer(pipe, coordinator, prompts, seed, max_lag))


async def _answer(
    pipe: Connection, coordinator: str, prompts: Sequence[tuple[int, ...]], seed: int, max_lag: int
) -> None:
    from controlplane.rollout.client import RolloutClient

    async with RolloutClient(coordinator, wait_seconds=WAIT_SECONDS, on_loss="resume") as client, AsyncExitStack() as s:
        maker = _Maker(client, prompts, seed, max_lag, s)

        async def answer(request: tuple[Any, ...]) -> Any:
            name, *arguments = request
            return await getattr(maker, name)(*arguments)

        await answer_all(pipe, answer)


class _Maker:
    """Does what `AsyncRollouts` asks for, by the same names."""

    def __init__(
        self, client: RolloutClient, prompts: Sequence[tuple[int, ...]], seed: int, max_lag: int, stack: AsyncExitStack
    ) -> None:
        from controlplane.rollout.staleness import StalenessGuard

        self._client = client
        self._prompts = prompts
        self._seed = seed
        self._guard = StalenessGuard(client.commits, max_lag)
        self._stack = stack
        self._ahead: RolloutsAhead

    async def begin(self, version: WeightVersion) -> None:
        from controlplane.rollout.ahead import RolloutsAhead

        self._ahead = RolloutsAhead(
            self._client,
            self._guard,
            version,
            shuffled(self._prompts, self._seed),
            training_sampling(self._seed),
            group_size=GROUP_SIZE,
            groups=PROMPTS_PER_STEP,
        )
        await self._stack.enter_async_context(self._ahead)

    async def take(self) -> Batch:
        return [rollouts_of(group) for group in await self._ahead.take()]

    async def pushed(self) -> None:
        self._ahead.pushed()

    async def answers(self, asks: Sequence[Ask], version: WeightVersion) -> list[Rollout]:
        return await gather_rollouts(partial(roll_out, self._client), asks, version)

    async def end(self) -> Account:
        await self._stack.aclose()
        return Account(self._ahead.busy, self._guard.lags, self._guard.dropped)


def shuffled(prompts: Sequence[tuple[int, ...]], seed: int) -> Iterator[tuple[int, ...]]:
    """All of them, in another order each time, for ever."""
    for epoch in itertools.count():
        yield from random.Random(seed + epoch).sample(prompts, len(prompts))


def rollouts_of(group: Group) -> list[Rollout]:
    return [rollout_of(group.prompt, admitted.sample) for admitted in group.samples]

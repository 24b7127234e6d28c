"""Rollouts made while the learner trains, never further ahead of it than a lag allows.

    guard = LagGuard(client.commits, max_lag=1)
    async with RolloutsAhead(client, guard, version, prompts, sampling, group_size=8, groups=8) as ahead:
        groups = await ahead.take()     # what to train on next; the next ones are begun meanwhile
        ...                             # train
        ahead.pushed()                  # the learner began a push: one commit more is to come

Promises: at most `groups` groups are made or in the making, so that nothing waits long and grows old; work that would
be too old when it is taken is not begun (withheld at the source); what is handed out is at most `max_lag` commits
behind the learner's own weights, which are ahead of the fleet's while a push is under way. A group is handed out whole
or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from controlplane.core.errors import DeadlineExceeded
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import WeightVersion
from controlplane.rollout.client import RolloutClient
from controlplane.rollout.lag_guard import Admitted, LagGuard
from controlplane.rollout.sample import Sample

TAKE_SECONDS = 600.0
FOLLOW_SECONDS = 1.0
"""How long a missed change of the routes can go unseen."""

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of one prompt, all of them fresh enough when they were taken."""

    prompt: Prompt
    samples: tuple[Admitted, ...]


class RolloutsAhead:
    """An async context manager; one event loop uses it."""

    def __init__(
        self,
        client: RolloutClient,
        guard: LagGuard,
        version: WeightVersion,
        prompts: Iterator[Prompt],
        sampling: SamplingSettings,
        *,
        group_size: int,
        groups: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`version`: the learner's weights, which the fleet committed; nothing is begun before the client heard of it.
        `prompts` never ends. `sampling.seed` is the first sample's; each further one has one more.
        """
        self._client = client
        self._guard = guard
        self._version = version
        self._prompts = prompts
        self._sampling = sampling
        self._group_size = group_size
        self._groups = groups
        self._clock = clock
        self._begun = 0
        self._making: set[asyncio.Task[None]] = set()
        self._made: list[tuple[Prompt, list[Sample]]] = []
        self._taken: list[Group] = []
        """Admitted for the batch that is being taken. They age no more: the learner stands still until it has it."""
        self._failure: BaseException | None = None
        self._first_ordinal: int | None = None
        """Of `version`; None before the client heard of it."""
        self._pushes = 0
        self._training = False
        """The learner has a batch that it has not pushed yet."""
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._busy_since = 0.0
        self.busy: list[tuple[float, float]] = []
        """When samples were in flight, by the clock: ended stretches, oldest first."""

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep_making()), asyncio.create_task(self._follow_fleet())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Nothing more is made; what is in flight is ended in its engines. Idempotent."""
        tasks = [*self._tasks, *self._making]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def pending_commits(self) -> int:
        """Pushes of the learner that the fleet has not committed yet, as far as was heard."""
        commits = self._guard.commits
        if self._first_ordinal is None and commits.latest and commits.latest[-1].version >= self._version:
            self._first_ordinal = commits.ordinal - commits.lag(self._version)
        if self._first_ordinal is None:
            return self._pushes
        return max(0, self._first_ordinal + self._pushes - commits.ordinal)

    def pushed(self) -> None:
        """The learner's weights moved on, and a push of them has begun. One that fails must end the training."""
        self._pushes += 1
        self._training = False
        self._wake()

    async def take(self, *, seconds: float = TAKE_SECONDS) -> list[Group]:
        """`groups` groups to train on. What became too old meanwhile is dropped, counted, and made anew.

        Raises:
            DeadlineExceeded: they were not made within `seconds`. What a sample's request raised.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._take()
        except TimeoutError:
            problem = f"{self._groups} groups at most {self._guard.max_lag} commits behind the learner"
            raise DeadlineExceeded(phase="rollout", waited_for=problem, waited_seconds=seconds) from None

    async def _take(self) -> list[Group]:
        while True:
            made, self._made = self._made, []
            self._taken += [group for each in made if (group := self._admitted(*each)) is not None]
            self._wake()
            if len(self._taken) == self._groups:
                break
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()
        taken, self._taken, self._training = self._taken, [], True
        return taken

    def _admitted(self, prompt: Prompt, samples: list[Sample]) -> Group | None:
        admitted = self._guard.admit_group(samples, pending_commits=self.pending_commits)
        return None if admitted is None else Group(prompt, tuple(admitted))

    # ---- making ---------------------------------------------------------------------------------

    def _commits_to_come(self) -> int:
        """Until what is begun now is taken."""
        return self.pending_commits + self._training

    def _may_begin(self) -> bool:
        to_come = self._commits_to_come()
        if self._first_ordinal is None or self._failure is not None:
            return False
        if len(self._making) + len(self._made) + len(self._taken) >= self._groups:
            return False
        return self._guard.may_begin(self._guard.commits.latest[-1].version, pending_commits=to_come)

    async def _keep_making(self) -> None:
        while True:
            while self._may_begin():
                self._begin()
            await self._changed.wait()

    def _begin(self) -> None:
        if not self._making:
            self._busy_since = self._clock()
        first, self._begun = self._begun, self._begun + self._group_size
        max_lag = self._guard.max_lag - self._commits_to_come()
        making = asyncio.create_task(self._make(next(self._prompts), first, max_lag))
        self._making.add(making)
        making.add_done_callback(self._ended)

    async def _make(self, prompt: Prompt, first: int, max_lag: int) -> None:
        try:
            async with asyncio.TaskGroup() as together:
                tasks = [
                    together.create_task(self._client.generate(prompt, self._nth(first + i), max_lag=max_lag))
                    for i in range(self._group_size)
                ]
        except ExceptionGroup as failures:
            self._failure = failures.exceptions[0]
        else:
            self._made.append((prompt, [task.result() for task in tasks]))

    def _ended(self, making: asyncio.Task[None]) -> None:
        self._making.discard(making)
        if not self._making:
            self.busy.append((self._busy_since, self._clock()))
        self._wake()

    def _nth(self, index: int) -> SamplingSettings:
        seed = self._sampling.seed
        return replace(self._sampling, seed=None if seed is None else seed + index)

    async def _follow_fleet(self) -> None:
        while True:
            if await self._client.changed(FOLLOW_SECONDS):
                self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

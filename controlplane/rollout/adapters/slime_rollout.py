"""One batch of slime's or vime's rollout: groups from a data source, until so many are whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from operator import eq
from typing import Any

from controlplane.core.errors import InvalidRequest
from controlplane.core.lag import Commits
from controlplane.rollout.adapters.slime_options import loaded, reward_function, sampling_params_of
from controlplane.rollout.adapters.slime_sample import last_version, mask_spans
from controlplane.rollout.client import RolloutClient

CUT_SECONDS = 30.0
"""For samples that were cut to come back."""
CUT_AGAIN_SECONDS = 1.0

Group = list[Any]
"""Samples of one prompt."""
Generate = Callable[[Any, Any, dict[str, Any]], Awaitable[Any]]


class Rollout:
    """One batch in the making."""

    def __init__(self, args: Any, rollout_id: int, data_source: Any, generate: Generate) -> None:
        """`generate` makes a sample where the options name no other function."""
        self._args = args
        self._rollout_id = rollout_id
        self._source = data_source
        self._keeps = loaded(args, "dynamic_sampling_filter_path")
        self._generate = loaded(args, "custom_generate_function_path") or generate
        self._running: dict[asyncio.Task[Group], Group] = {}

    async def run(self, client: RolloutClient) -> list[Group]:
        """`client` is the one that `generate` uses."""
        try:
            done = await self._full_batch()
            await self._cut(client)
        finally:
            await _cancelled(self._running)
        self._mask(done, client.commits)
        if (choose := loaded(self._args, "rollout_sample_filter_path")) is not None:
            choose(self._args, done)
        return sorted(done, key=lambda group: group[0].index)

    async def _full_batch(self) -> list[Group]:
        wanted, done = self._args.rollout_batch_size, list[Group]()
        while len(done) < wanted:
            while len(done) + len(self._running) < wanted:
                self._submit(getattr(self._args, "over_sampling_batch_size", None) or wanted)
            finished, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                del self._running[task]
                group = task.result()
                if _unfinished(group):  # an update cut it in a generate function of theirs: it goes on
                    self._begin(group)
                elif self._keep(group):
                    done.append(group)
        self._put_back(done[wanted:])
        return done[:wanted]

    def _submit(self, count: int) -> None:
        groups = self._source.get_samples(count)
        if not groups:
            raise InvalidRequest(field="data_source", problem="it has no samples left")
        for group in groups:
            self._begin(group)

    def _begin(self, group: Group) -> None:
        self._running[asyncio.create_task(self._group(group))] = group

    async def _group(self, group: Group) -> Group:
        try:
            async with asyncio.TaskGroup() as together:
                for sample in group:
                    together.create_task(self._one(sample))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if self._args.group_rm and not _unfinished(group):
            rewards = await reward_function(self._args, group[0])(self._args, group)
            for sample, reward in zip(group, rewards, strict=True):
                sample.reward = reward
        return group

    async def _one(self, sample: Any) -> None:
        if sample.status.value in ("completed", "truncated"):
            return  # it was done before its group was cut
        if await self._generate(self._args, sample, sampling_params_of(self._args)) is not sample:
            problem = "it returned another sample than it was given; one that makes several of one has no place here"
            raise InvalidRequest(field="args.custom_generate_function_path", problem=problem)
        if not self._args.group_rm and sample.reward is None and not _unfinished([sample]):
            sample.reward = await reward_function(self._args, sample)(self._args, sample)

    def _keep(self, group: Group) -> bool:
        if self._keeps is None:
            return True
        verdict = self._keeps(self._args, group)
        return bool(getattr(verdict, "keep", verdict))

    # ---- what is not done when the batch is full ------------------------------------------------

    async def _cut(self, client: RolloutClient) -> None:
        """Unfinished samples come back with the tokens that they have, and their groups go back whole."""
        if not self._args.partial_rollout or not self._running:
            return
        groups, give_up = list(self._running.values()), time.monotonic() + CUT_SECONDS
        while self._running and time.monotonic() < give_up:  # a generate function of theirs may ask again
            await client.abort()
            ended, _ = await asyncio.wait(self._running, timeout=CUT_AGAIN_SECONDS)
            for task in ended:
                del self._running[task]
                task.result()
        self._put_back(groups)

    def _put_back(self, groups: Sequence[Group]) -> None:
        if not self._args.partial_rollout or not groups:
            return
        for sample in (sample for group in groups for sample in group if sample.response_length):
            sample.metadata.setdefault("start_rollout_id", self._rollout_id)
        self._source.add_samples(list(groups))

    def _mask(self, groups: Sequence[Group], commits: Commits) -> None:
        max_lag = getattr(self._args, "weightplane_max_lag", None)
        for sample in (sample for group in groups for sample in group):
            if self._args.partial_rollout and self._args.mask_offpolicy_in_partial_rollout:
                mask_spans(sample, partial(eq, last_version(sample)))
            if max_lag is not None:
                mask_spans(sample, lambda version: commits.lag(version) <= max_lag)


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Nothing runs on in an engine for a batch that is over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _unfinished(group: Group) -> bool:
    return any(sample.status.value in ("pending", "aborted") for sample in group)

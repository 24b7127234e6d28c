"""Rollouts made while the learner trains: what is begun, withheld, dropped and handed out, over real gRPC."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from controlplane.core import errors as e
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.ahead import Group, RolloutsAhead
from controlplane.rollout.lag_guard import LagGuard
from tests.support.eventually import eventually
from tests.support.fake_fleet import FakeEngine, finish, tokens, version
from tests.support.rollout_world import World
from weightplane.v1 import rollout_pb2

SIZE, GROUPS = 2, 3
BATCH = SIZE * GROUPS
SAMPLING = SamplingSettings(max_tokens=2, seed=100)


class Learner:
    """A scripted fleet whose engine serves what was committed last, and rollouts ahead of a learner."""

    def __init__(self) -> None:
        self.world = World()
        self.stack = AsyncExitStack()
        self.engine: FakeEngine
        self.guard: LagGuard
        self.ahead: RolloutsAhead
        self.number = 0
        self.behind = 0
        """By how many versions what the engine makes is older than what it says that it holds."""
        self.seconds: Iterator[int] = itertools.count()

    async def start(self, max_lag: int) -> None:
        await self.world.start()
        self.engine = await self.world.engine("a", self.answer)
        self.guard = LagGuard(self.world.client.commits, max_lag)
        self.ahead = RolloutsAhead(
            self.world.client,
            self.guard,
            version(1),
            itertools.cycle([(1,), (2,), (3,), (4,)]),
            SAMPLING,
            group_size=SIZE,
            groups=GROUPS,
            clock=lambda: float(next(self.seconds)),
        )
        await self.stack.enter_async_context(self.ahead)

    async def answer(self, request: rollout_pb2.GenerateRequest) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        made_by = self.number - self.behind
        yield tokens(5, 6, made_by=made_by)
        yield finish((made_by, 0, 2))

    async def commit(self) -> None:
        """The fleet came to serve the next version, and the client heard of it."""
        self.number += 1
        self.engine.applied = version(self.number)
        self.world.fleet.commits(self.number)
        self.world.fleet.publish(self.engine)
        await eventually(lambda: self.world.client.commits.ordinal == self.number)

    async def hears_again(self) -> None:
        known = self.world.client.routes
        self.world.fleet.publish(self.engine)
        await eventually(lambda: self.world.client.routes != known)
        await self.world.generate()
        self.engine.requests.pop()

    async def take(self) -> list[Group]:
        return await self.ahead.take(seconds=60.0)

    async def begun(self, batches: int) -> None:
        """So many whole batches were asked for, and no request more."""
        await eventually(lambda: len(self.engine.requests) >= batches * BATCH)
        await self.hears_again()  # what was to come has come by then
        assert len(self.engine.requests) == batches * BATCH


@pytest.fixture
async def learner() -> AsyncIterator[Learner]:
    made = Learner()
    yield made
    await made.stack.aclose()
    await made.world.stack.aclose()


def lags(groups: list[Group]) -> set[int]:
    return {lag for group in groups for admitted in group.samples for lag in admitted.lags}


async def test_nothing_is_begun_before_the_learners_version_is_heard_of(learner: Learner) -> None:
    await learner.start(max_lag=1)
    await learner.begun(0)
    await learner.commit()
    assert lags(await learner.take()) == {0}


async def test_R2_the_next_batch_is_made_while_the_learner_trains_and_is_one_commit_behind_it(
    learner: Learner,
) -> None:
    await learner.start(max_lag=1)
    await learner.commit()
    first = await learner.take()
    assert sorted((group.prompt, len(group.samples)) for group in first) == [((n,), SIZE) for n in (1, 2, 3)]
    await learner.begun(2)  # the learner trains: the second batch is made by version 1
    learner.ahead.pushed()
    assert lags(await learner.take()) == {1}
    assert learner.guard.lags == {0: 2 * BATCH, 1: 2 * BATCH}


async def test_R2_what_would_be_too_old_when_it_is_taken_is_not_begun(learner: Learner) -> None:
    await learner.start(max_lag=1)
    await learner.commit()
    await learner.take()
    learner.ahead.pushed()
    await learner.take()  # trains, and its last push is not committed: work begun now would be two behind
    await learner.begun(2)
    await learner.commit()
    await learner.begun(3)
    learner.ahead.pushed()
    assert lags(await learner.take()) == {1}
    assert learner.guard.dropped == {}
    pins = [request.pin.max_lag for request in learner.engine.requests]
    assert pins == [1] * BATCH + [0] * 2 * BATCH


async def test_R2_at_lag_0_nothing_is_begun_before_the_learners_push_is_committed(learner: Learner) -> None:
    await learner.start(max_lag=0)
    await learner.commit()
    await learner.take()
    learner.ahead.pushed()
    await learner.begun(1)
    await learner.commit()
    assert lags(await learner.take()) == {0}


async def test_R2_what_grew_too_old_is_dropped_by_group_counted_and_made_anew(learner: Learner) -> None:
    await learner.start(max_lag=1)
    await learner.commit()
    await learner.take()
    learner.ahead.pushed()
    await learner.commit()
    await learner.take()
    learner.ahead.pushed()
    learner.behind = 1  # the engine goes on with what it held before, whatever its route says
    await learner.begun(3)
    taking = asyncio.create_task(learner.take())
    await eventually(lambda: learner.guard.dropped.total() >= BATCH)
    await learner.commit()
    learner.behind = 0
    assert lags(await taking) <= {0, 1}
    assert learner.guard.dropped["lag", 1] >= BATCH


async def test_no_two_samples_have_one_seed(learner: Learner) -> None:
    await learner.start(max_lag=1)
    await learner.commit()
    await learner.take()
    await learner.begun(2)
    assert sorted(r.sampling.seed for r in learner.engine.requests) == [100 + i for i in range(2 * BATCH)]


async def test_an_error_of_a_request_is_the_batchs_and_no_other_is_begun(learner: Learner) -> None:
    await learner.start(max_lag=1)

    async def refuses(request: rollout_pb2.GenerateRequest) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        raise e.InvalidRequest(field="prompt", problem="no")
        yield

    learner.engine.script = refuses
    await learner.commit()
    with pytest.raises(e.InvalidRequest):
        await learner.take()
    asked = len(learner.engine.requests)
    with pytest.raises(e.InvalidRequest):
        await learner.take()
    assert len(learner.engine.requests) == asked


async def test_a_batch_that_does_not_come_is_a_deadline_that_says_what_was_waited_for(learner: Learner) -> None:
    await learner.start(max_lag=1)
    with pytest.raises(e.DeadlineExceeded, match="3 groups at most 1 commits behind the learner"):
        await learner.ahead.take(seconds=0.05)


async def test_when_samples_were_in_flight_is_told_by_stretches(learner: Learner) -> None:
    await learner.start(max_lag=1)
    await learner.commit()
    await learner.take()
    await learner.begun(2)
    await eventually(lambda: len(learner.ahead.busy) >= 2)
    edges = [edge for stretch in learner.ahead.busy for edge in stretch]
    assert edges == sorted(edges)

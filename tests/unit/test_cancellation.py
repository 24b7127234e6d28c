"""A cancellation that comes in the very moment in which the wait ends is not lost: a loop that is told to end does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from controlplane.rollout.board import RouteBoard
from controlplane.rollout.connections import Connections
from controlplane.rpc.tasks import to_the_end

Wait = Callable[[RouteBoard], Awaitable[object]]


async def _to_the_end(board: RouteBoard) -> None:
    await to_the_end(board.change(0.05))


@pytest.mark.parametrize(
    "wait",
    [lambda board: board.change(5.0), lambda board: board.room(5.0), _to_the_end],
    ids=["a change of routes", "room", "work that goes to its end"],
)
@pytest.mark.parametrize("steps", range(6), ids="after {} steps of the loop".format)
async def test_who_is_cancelled_as_the_routes_change_does_not_wait_again(wait: Wait, steps: int) -> None:
    board = RouteBoard(Connections())

    async def for_ever() -> None:
        while True:
            await wait(board)

    task = asyncio.create_task(for_ever())
    await asyncio.sleep(0.01)
    board.wake()
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=4.0)
    task.cancel()
    assert done == {task}
    assert task.cancelled()


async def test_work_that_is_cancelled_itself_is_told_to_who_waits_for_it() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await to_the_end(cancelled())
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0

"""A value that is watched: its last state is seen, and a watch of one that ended ends."""

from __future__ import annotations

import asyncio

from controlplane.rpc.latest import Latest


async def all_of(latest: Latest[int]) -> list[int]:
    return [value async for value in latest.watch()]


async def test_whoever_watches_sees_the_last_value_before_the_end() -> None:
    latest = Latest(1)
    watching = asyncio.create_task(all_of(latest))
    await latest.watched()
    latest.set(2)
    latest.end()
    assert await asyncio.wait_for(watching, 10) == [1, 2]


async def test_a_watch_that_begins_after_the_end_sees_the_value_once() -> None:
    latest = Latest(1)
    latest.end()
    assert await asyncio.wait_for(all_of(latest), 10) == [1]


async def test_what_is_set_after_the_end_keeps_no_watch_alive() -> None:
    """A dead life's tasks end one after the other, and each may say something yet."""
    latest = Latest(1)
    watching = asyncio.create_task(all_of(latest))
    await latest.watched()
    latest.end()
    latest.set(2)
    assert await asyncio.wait_for(watching, 10) == [1]
    assert latest.value == 2


async def test_a_watch_of_one_that_did_not_end_goes_on() -> None:
    latest = Latest(0)
    watching = asyncio.create_task(all_of(latest))
    await latest.watched()
    latest.set(1)
    await asyncio.wait({watching}, timeout=0.05)
    assert not watching.done()
    watching.cancel()

"""One stream to a scripted engine agent: when commit frames go (INV-3), and when memory counts as free (INV-12)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from controlplane.core import errors as e
from tests.support.eventually import eventually
from tests.support.stream_attempts import (
    ACCEPTED,
    APPLIED,
    ATTACHED,
    READY,
    VERSION,
    FakeAgent,
    Response,
    attempt,
    refusing,
    until,
)
from trainer_agent.agent.stream import StreamEnd
from weightplane.v1 import fleet_pb2, weight_update_pb2


async def obliging(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
    """Takes everything."""
    await until(frames, "open")
    yield ACCEPTED
    await until(frames, "chunk")
    yield Response(chunk_released=weight_update_pb2.ChunkReleased(version=VERSION, index=0))
    yield READY
    await until(frames, "commit")
    yield APPLIED


async def vanishing_after_chunk(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
    """Breaks off without a word of its own, as a connection does."""
    await until(frames, "open")
    yield ACCEPTED
    await until(frames, "chunk")
    raise RuntimeError("gone")


async def silent_after_commit(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
    """Ends the stream after the commit frame, its install going on without it."""
    await until(frames, "open")
    yield ACCEPTED
    await until(frames, "chunk")
    yield READY
    await until(frames, "commit")


async def attaching(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
    """The update was committed before: gives its outcome."""
    await until(frames, "open")
    yield ATTACHED
    yield APPLIED


async def test_no_commit_frame_goes_before_the_coordinators_go() -> None:
    agent = FakeAgent(obliging)
    async with attempt(agent) as running:
        running.export()
        await eventually(lambda: running.stream.ready)
        assert agent.frames == [["open", "layout_part", "chunk"]]
        await running.phase(fleet_pb2.UPDATE_PHASE_GO)
        assert await running.end() == StreamEnd(None, memory_free=True)
        assert agent.frames[0][-1] == "commit"


async def test_an_engine_that_is_ready_after_the_decision_still_comes_to_the_served_version() -> None:
    agent = FakeAgent(obliging)
    async with attempt(agent) as running:
        await running.phase(fleet_pb2.UPDATE_PHASE_COMMITTED)
        running.export()
        assert (await running.end()).error is None


async def test_a_failed_update_is_given_up_by_a_word_and_its_memory_is_free_once_confirmed() -> None:
    agent = FakeAgent(obliging)
    async with attempt(agent) as running:
        running.export()
        await eventually(lambda: running.stream.ready)
        await running.phase(fleet_pb2.UPDATE_PHASE_FAILED)
        end = await running.end()
        assert isinstance(end.error, e.UpdateAborted)
        assert end.memory_free
        assert agent.frames == [["open", "layout_part", "chunk", "abort"]]


async def test_an_abort_in_mid_stream_carries_its_reason_and_no_commit() -> None:
    agent = FakeAgent(obliging)
    async with attempt(agent) as running:
        await eventually(lambda: bool(agent.frames) and "layout_part" in agent.frames[0])
        running.stream.abort("rank 1 went away")
        end = await running.end()
        assert end.memory_free
        assert agent.abort_reasons == ["rank 1 went away"]


CHUNKS = 100
"""Of 4096 records each: more than a connection takes while nobody reads."""


async def test_inv12_an_abort_that_meets_a_write_still_carries_its_reason_and_is_confirmed() -> None:
    """The agent reads on only after the abort: the chunk's write is under way when it comes."""
    read_on = asyncio.Event()

    async def slow(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
        await until(frames, "open")
        yield ACCEPTED
        await until(frames, "layout_part")
        await read_on.wait()
        await until(frames, "commit")

    agent = FakeAgent(slow)
    async with attempt(agent) as running:
        await eventually(lambda: bool(agent.frames) and "layout_part" in agent.frames[0])
        for index in range(CHUNKS):
            running.announce(index, records=4096)
        await eventually(running.stalls)
        running.stream.abort("rank 1 went away")
        asyncio.get_running_loop().call_later(0.2, read_on.set)
        end = await running.end()
        assert 1 <= agent.frames[0].count("chunk") < CHUNKS
        assert agent.abort_reasons == ["rank 1 went away"]
        assert isinstance(end.error, e.UpdateAborted)
        assert end.memory_free


@pytest.mark.parametrize("after", ["open", "chunk"])
async def test_a_refusal_before_the_commit_frees_the_memory_and_is_final(after: str) -> None:
    refusal = e.ShapeMismatch(name="a", expected=(5,), got=(4,))
    async with attempt(FakeAgent(refusing(refusal, after))) as running:
        running.export()
        end = await running.end()
        assert str(end.error) == str(refusal)
        assert end.memory_free


async def test_a_failed_install_leaves_the_memory_in_doubt() -> None:
    failure = e.InstallFailed(engine_id="e0", version="1.7", touched=True, cause="x")
    async with attempt(FakeAgent(refusing(failure, "commit"))) as running:
        running.export()
        await running.phase(fleet_pb2.UPDATE_PHASE_GO)
        end = await running.end()
        assert isinstance(end.error, e.InstallFailed)
        assert not end.memory_free


async def test_a_stream_that_broke_without_the_agents_word_leaves_the_memory_in_doubt() -> None:
    async with attempt(FakeAgent(vanishing_after_chunk)) as running:
        running.export()
        end = await running.end()
        assert not end.memory_free


async def test_a_busy_engine_is_asked_again_from_the_first_chunk_on() -> None:
    busy = e.UpdateInProgress(update_id="other", version="1.6")
    agent = FakeAgent(refusing(busy, "open"), refusing(busy, "open"), obliging)
    async with attempt(agent) as running:
        running.export()
        await running.phase(fleet_pb2.UPDATE_PHASE_GO)
        assert (await running.end()).error is None
        assert agent.frames == [["open"], ["open"], ["open", "layout_part", "chunk", "commit"]]


async def test_after_the_commit_a_broken_stream_attaches_and_gets_the_outcome() -> None:
    agent = FakeAgent(silent_after_commit, attaching)
    async with attempt(agent) as running:
        running.export()
        await running.phase(fleet_pb2.UPDATE_PHASE_GO)
        assert await running.end() == StreamEnd(None, memory_free=True)
        assert agent.frames == [["open", "layout_part", "chunk", "commit"], ["open"]]


async def test_an_abort_after_the_commit_only_ends_the_waiting() -> None:
    async def never(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
        async for response in silent_after_commit(_agent, frames):
            yield response
        await asyncio.sleep(60)

    agent = FakeAgent(never)
    async with attempt(agent) as running:
        running.export()
        await running.phase(fleet_pb2.UPDATE_PHASE_GO)
        await eventually(lambda: bool(agent.frames) and agent.frames[0][-1] == "commit")
        running.stream.abort("the push is over")
        end = await running.end()
        assert not end.memory_free
        assert agent.abort_reasons == []

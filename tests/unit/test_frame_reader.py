"""Frames of a stream at an engine agent: in order, within the idle limit, few ahead, and none past an end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from controlplane.core import errors as e
from controlplane.rpc.bulk import BulkFrame
from engine_agent.services.update_reader import AHEAD, Frame, FrameReader
from tests.support.eventually import eventually
from weightplane.v1 import weight_update_pb2

Request = weight_update_pb2.UpdateWeightsRequest


class Writer:
    """What gRPC hands over: frames one by one, then an error, the end, or nothing."""

    def __init__(self, frames: Sequence[Frame], then: Exception | None = None, *, silent: bool = False) -> None:
        self.asked = 0
        self._frames = frames
        self._then = then
        self._silent = silent

    async def frames(self) -> AsyncIterator[Frame]:
        for frame in self._frames:
            self.asked += 1
            yield frame
        if self._silent:
            await asyncio.Event().wait()
        if self._then is not None:
            raise self._then


def chunk(index: int) -> Request:
    return Request(chunk=weight_update_pb2.Chunk(index=index))


def reader_of(writer: Writer, idle_seconds: float = 20.0) -> tuple[FrameReader, asyncio.Future[e.WeightplaneError]]:
    ended: asyncio.Future[e.WeightplaneError] = asyncio.get_running_loop().create_future()
    return FrameReader(writer.frames(), ended, idle_seconds), ended


async def test_frames_come_in_their_order_and_after_the_last_comes_the_end_for_good() -> None:
    reader, _ = reader_of(Writer([chunk(i) for i in range(5)]))
    assert [frame.chunk.index for _ in range(5) if (frame := await reader.next())] == list(range(5))
    assert await reader.next() is None
    assert await reader.next() is None


async def test_inv3_an_error_of_the_stream_is_heard_after_the_frames_before_it_and_not_instead_of_the_end() -> None:
    error = e.FrameInvalid("Chunk", "index", "is required")
    reader, _ = reader_of(Writer([chunk(0), chunk(1)], error))
    assert await reader.comes(20.0)
    assert [frame.chunk.index for _ in range(2) if (frame := await reader.next())] == [0, 1]
    for _ in range(2):
        with pytest.raises(e.FrameInvalid):
            await reader.next()


async def test_no_more_frames_are_taken_from_grpc_than_one_that_waits_and_one_in_hand() -> None:
    writer = Writer([chunk(i) for i in range(50)])
    reader, _ = reader_of(writer)
    for taken in range(1, 50 - AHEAD):
        assert await reader.next() is not None
        await eventually(lambda taken=taken: writer.asked == taken + AHEAD + 1)  # type: ignore[misc]
        for _ in range(10):
            await asyncio.sleep(0)
        assert writer.asked == taken + AHEAD + 1


async def test_silence_longer_than_the_idle_limit_is_an_abort() -> None:
    reader, _ = reader_of(Writer([chunk(0)], silent=True), idle_seconds=0.02)
    assert await reader.next() is not None
    with pytest.raises(e.UpdateAborted, match="no frame for"):
        await reader.next()


async def test_what_another_event_ended_is_heard_before_any_frame_that_is_there_already() -> None:
    reader, ended = reader_of(Writer([chunk(0), chunk(1)]))
    assert await reader.next() is not None
    assert await reader.comes(20.0)
    ended.set_result(e.StaleTerm(model="policy", got=1, current=2))
    with pytest.raises(e.StaleTerm):
        await reader.next()


async def test_who_waits_for_a_frame_hears_of_the_end_that_another_event_made() -> None:
    reader, ended = reader_of(Writer([], silent=True))
    waiting = asyncio.ensure_future(reader.next())
    await asyncio.sleep(0)
    ended.set_result(e.StaleTerm(model="policy", got=1, current=2))
    with pytest.raises(e.StaleTerm):
        await waiting


async def test_a_frame_that_was_waited_for_in_vain_is_not_lost() -> None:
    reader, _ = reader_of(Writer([chunk(7)], silent=True))
    assert await reader.comes(20.0)
    assert await reader.comes(0.0)
    frame = await reader.next()
    assert frame is not None
    assert frame.chunk.index == 7
    assert not await reader.comes(0.01)


async def test_the_payload_is_the_one_of_the_frame_that_was_asked_for_last_and_not_of_one_that_waits() -> None:
    bulk = [BulkFrame(chunk(i), memoryview(bytes([i]))) for i in range(3)]
    reader, _ = reader_of(Writer([*bulk, chunk(3)]))
    for i in range(3):
        frame = await reader.next()
        assert await reader.comes(20.0)  # the next one is there
        assert frame is not None
        assert (frame.chunk.index, bytes(reader.payload or b"")) == (i, bytes([i]))
    assert await reader.next() is not None
    assert reader.payload is None


async def test_any_frame_or_end_while_the_writer_was_to_wait_ends_the_work() -> None:
    abort = Request(abort=weight_update_pb2.Abort(reason="enough"))
    for writer, error in (
        (Writer([abort]), e.UpdateAborted),
        (Writer([chunk(0)]), e.FrameOutOfOrder),
        (Writer([]), e.UpdateAborted),
    ):
        ended_early = asyncio.Event()

        async def work(ended_early: asyncio.Event = ended_early) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended_early.set()

        reader, _ = reader_of(writer)
        with pytest.raises(error):
            await reader.during(work())
        await asyncio.wait_for(ended_early.wait(), 20.0)


async def test_work_that_ends_while_nothing_comes_leaves_the_next_frame_for_its_turn() -> None:
    reader, _ = reader_of(Writer([], silent=True))
    await reader.during(asyncio.sleep(0))
    assert not await reader.comes(0.0)
    reader.close()

"""The writer's frames of one UpdateWeights stream, one by one: within the idle limit, and with what ends the stream.

Promises: whoever waits for a frame, or works while the writer only waits, hears of the stream's end (INV-3). While a
frame is worked on gRPC brings the next; no more than AHEAD wait here for their turn, and all of them in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

from controlplane.core import errors as e
from controlplane.rpc.bulk import BulkFrame
from weightplane.v1 import weight_update_pb2

Frame = weight_update_pb2.UpdateWeightsRequest | BulkFrame
Frames = AsyncIterator[Frame]
AHEAD = 1
"""Frames that came and were not asked for yet, beside one that gRPC has in hand: each may have a MiB."""
MAX_LAYOUT_TENSORS = 1_000_000
"""As the manifest's own limit."""
READY_IDLE_SECONDS = 600.0
"""Longest wait for the commit frame once all bytes are in; above the coordinator's own limit for go."""


class FrameReader:
    """The next frame, within the idle limit; or the error with which another event ended the stream."""

    def __init__(self, frames: Frames, ended: asyncio.Future[e.WeightplaneError], idle_seconds: float) -> None:
        self._frames = frames
        self._ended = ended
        self._idle_seconds = idle_seconds
        self._came: deque[Frame] = deque()
        self._reading: asyncio.Task[None] | None = None
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self.payload: memoryview | None = None
        """Of the latest chunk: its inline bytes, where they are not in its buffer."""
        ended.add_done_callback(self._tell)

    async def next(self, *, ready: bool = False) -> weight_update_pb2.UpdateWeightsRequest | None:
        """None at the end of the stream. Raises the ending error, or UpdateAborted after silence.

        `ready`: only the commit is missing, which waits for the slowest engine of the fleet.
        """
        limit = READY_IDLE_SECONDS if ready else self._idle_seconds
        if not await self.comes(limit):
            raise e.UpdateAborted(update_id="", cause=f"no frame for {limit} s")
        came = self._take()
        self.payload = came.payload if isinstance(came, BulkFrame) else None
        return came.frame if isinstance(came, BulkFrame) else came

    async def comes(self, seconds: float) -> bool:
        """Whether a frame, or the stream's end, is there to be taken within so long. Raises the ending error."""
        if not self._there():
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._arrival()
        if self._ended.done():
            raise self._ended.result()
        return self._there()

    async def open(self) -> weight_update_pb2.UpdateOpen:
        """The first frame. Raises FrameOutOfOrder, and as `next`."""
        frame = await self.next()
        if frame is None or frame.WhichOneof("frame") != "open":
            raise e.FrameOutOfOrder(expected="open", got=_kind(frame))
        return frame.open

    async def layout_parts(self, tensor_count: int) -> list[weight_update_pb2.LayoutPart]:
        """All of them, in order, of so many tensors at most. Raises FrameOutOfOrder, LimitExceeded, and as `next`."""
        parts: list[weight_update_pb2.LayoutPart] = []
        tensors = 0
        while not parts or len(parts) < parts[0].count:
            frame = await self.next()
            if frame is not None and frame.WhichOneof("frame") == "abort":
                raise untimely(frame)
            if frame is None or frame.WhichOneof("frame") != "layout_part":
                raise e.FrameOutOfOrder(expected=f"layout part {len(parts)}", got=_kind(frame))
            part = frame.layout_part
            if part.index != len(parts) or (parts and part.count != parts[0].count):
                raise e.FrameOutOfOrder(expected=f"layout part {len(parts)}", got=f"part {part.index}/{part.count}")
            tensors += len(part.tensors)
            if tensors > min(tensor_count, MAX_LAYOUT_TENSORS):
                raise e.LimitExceeded(what="tensors of the layout", limit=tensor_count, got=tensors)
            parts.append(part)
        return parts

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, for which the writer only waits. Its end, its abort and any other frame end the work too."""
        task, arrival = asyncio.ensure_future(work), asyncio.ensure_future(self._arrival())
        try:
            ends: set[asyncio.Future[Any]] = {task, arrival}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise self._ended.result()
            if not task.done():
                came = self._take()
                raise untimely(came.frame if isinstance(came, BulkFrame) else came)
            task.result()
        finally:
            arrival.cancel()
            task.cancel()
            task.add_done_callback(_seen)

    def close(self) -> None:
        self._ended.remove_done_callback(self._tell)
        if self._reading is not None:
            self._reading.cancel()

    def _there(self) -> bool:
        """A frame is, or the end."""
        return bool(self._came) or (self._reading is not None and self._reading.done())

    async def _arrival(self) -> None:
        """Return when a frame or the end is there, or the stream was ended."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(self._tell)
        while not (self._there() or self._ended.done()):
            self._news.clear()
            await self._news.wait()

    async def _read(self) -> None:
        async for frame in self._frames:
            while len(self._came) == AHEAD:
                self._room.clear()
                await self._room.wait()
            self._came.append(frame)
            self._news.set()

    def _take(self) -> Frame | None:
        """None: the end. Raises what ended the reading, once every frame before it was taken."""
        assert self._reading is not None, "something came"
        if self._came:
            self._room.set()
            return self._came.popleft()
        self._reading.result()
        return None

    def _tell(self, over: asyncio.Future[Any]) -> None:
        _seen(over)
        self._news.set()


def untimely(frame: weight_update_pb2.UpdateWeightsRequest | None) -> e.WeightplaneError:
    """The writer's end, or a frame that does not belong where it came."""
    kind = frame.WhichOneof("frame") if frame is not None else None
    if frame is None:
        return e.UpdateAborted(update_id="", cause="the stream ended without a commit")
    if kind == "abort":
        return e.UpdateAborted(update_id="", cause=frame.abort.reason or "the writer gave up")
    return e.FrameOutOfOrder(expected="what the last answer asked for", got=str(kind))


def _kind(frame: weight_update_pb2.UpdateWeightsRequest | None) -> str:
    return "the end" if frame is None else str(frame.WhichOneof("frame"))


def _seen(task: asyncio.Future[Any]) -> None:
    """Nobody else may want its error."""
    if not task.cancelled():
        task.exception()

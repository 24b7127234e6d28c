"""The writer's frames of one UpdateWeights stream, one by one: within the idle limit, and with what ends the stream.

Promises: whoever waits for a frame, or works while the writer only waits, hears of the stream's end (INV-3).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from controlplane.core import errors as e
from controlplane.rpc.bulk import BulkFrame
from weightplane.v1 import weight_update_pb2

Frame = weight_update_pb2.UpdateWeightsRequest | BulkFrame
Frames = AsyncIterator[Frame]
MAX_LAYOUT_TENSORS = 1_000_000
"""As the manifest's own limit."""
READY_IDLE_SECONDS = 600.0
"""Longest wait for the commit frame once all bytes are in; above the coordinator's own limit for go."""


class FrameReader:
    """The next frame, within the idle limit; or the error with which another event ended the stream."""

    def __init__(self, frames: Frames, ended: asyncio.Future[e.WeightplaneError], idle_seconds: float) -> None:
        self._frames = aiter(frames)
        self._ended = ended
        self._idle_seconds = idle_seconds
        self._pending: asyncio.Future[Frame | None] | None = None
        self.payload: memoryview | None = None
        """Of the latest chunk: its inline bytes, where they are not in its buffer."""

    async def next(self, *, ready: bool = False) -> weight_update_pb2.UpdateWeightsRequest | None:
        """None at the end of the stream. Raises the ending error, or UpdateAborted after silence.

        `ready`: only the commit is missing, which waits for the slowest engine of the fleet.
        """
        limit = READY_IDLE_SECONDS if ready else self._idle_seconds
        frame = self._coming()
        ends: set[asyncio.Future[Any]] = {frame, self._ended}
        await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            raise self._ended.result()
        if not frame.done():
            raise e.UpdateAborted(update_id="", cause=f"no frame for {limit} s")
        self._pending = None
        came = frame.result()
        self.payload = came.payload if isinstance(came, BulkFrame) else None
        return came.frame if isinstance(came, BulkFrame) else came

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
        task, frame = asyncio.ensure_future(work), self._coming()
        try:
            ends: set[asyncio.Future[Any]] = {task, frame, self._ended}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise self._ended.result()
            if not task.done():
                came = frame.result()
                raise untimely(came.frame if isinstance(came, BulkFrame) else came)
            task.result()
        finally:
            task.cancel()
            task.add_done_callback(_seen)

    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()

    def _coming(self) -> asyncio.Future[Frame | None]:
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._next_or_none())
        return self._pending

    async def _next_or_none(self) -> Frame | None:
        return await anext(self._frames, None)


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


def _seen(task: asyncio.Future[None]) -> None:
    """Of work that was ended nobody wants the error."""
    if not task.cancelled():
        task.exception()

"""What an engine agent answers in one attempt of a stream, and how its end reads.

Promises: its own word comes before what gRPC makes of a broken connection; giving up is said, and confirmed within a
limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc

from controlplane.core.errors import DeadlineExceeded, FrameOutOfOrder, WeightplaneError
from controlplane.rpc.errors import RemoteError, from_rpc_error
from weightplane.v1 import version_pb2, weight_update_pb2

ABORT_SECONDS = 3.0
"""How long an engine agent may take to confirm an abort; without its word its reads count as going on."""
MAX_HEARD = 8
"""Frames from the agent that may wait here: it says three things in a stream, apart from releases."""
MAX_REASON_LENGTH = 4096

Call = grpc.aio.StreamStreamCall[
    weight_update_pb2.UpdateWeightsRequest | bytes, weight_update_pb2.UpdateWeightsResponse
]
Request = weight_update_pb2.UpdateWeightsRequest
Frames = asyncio.Queue[weight_update_pb2.UpdateWeightsResponse | None]
"""What the agent said; None: it ended the stream."""


async def hear_all(call: Call, frames: Frames, let_go: Callable[[int], None]) -> None:
    """What the agent says, until its stream ends; raises its status if that is an error.

    `let_go` hears of single chunks that it reads no more, at once: whoever waits for frames may not be there.
    """
    async for frame in call:
        if frame.HasField("chunk_released"):
            let_go(frame.chunk_released.index)
        else:
            await frames.put(frame)
    await frames.put(None)


async def accepted_frame(frames: Frames, seconds: float) -> weight_update_pb2.UpdateAccepted:
    """The answer to `open`. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(seconds):
            return (await expect(frames, "accepted")).accepted
    except TimeoutError:
        raise DeadlineExceeded(
            phase="open", waited_for="the engine agent to judge it", waited_seconds=seconds
        ) from None


async def expect(frames: Frames, kind: str) -> weight_update_pb2.UpdateWeightsResponse:
    frame = await frames.get()
    if frame is None:
        raise RemoteError(code="UNAVAILABLE", text=f"the engine agent ended the stream before `{kind}`")
    if frame.WhichOneof("frame") != kind:
        raise FrameOutOfOrder(expected=kind, got=str(frame.WhichOneof("frame")))
    return frame


class Outgoing:
    """Frames to the agent. Who gives up waiting for a write leaves it to its end: gRPC ends a call whose write is
    cancelled, and the word that was to follow would be lost."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._writing: asyncio.Future[None] | None = None

    async def write(self, frame: Request | bytes) -> None:
        """`frame`: or one that is serialized."""
        self._writing = asyncio.ensure_future(self._call.write(frame))
        self._writing.add_done_callback(
            lambda write: write.cancelled() or write.exception()
        )  # taken, if nobody else does
        await asyncio.shield(self._writing)

    async def say_abort(self, version: version_pb2.WeightVersion, reason: str) -> None:
        """The abort frame, once the write under way has ended; within a limit, for an agent may read nothing more."""
        frame = weight_update_pb2.Abort(version=version, reason=reason[:MAX_REASON_LENGTH])
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                if self._writing is not None:
                    await asyncio.wait({self._writing})
                await self._call.write(Request(abort=frame))
                await self._call.done_writing()


def typed(error: BaseException | None) -> WeightplaneError:
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc_error(error)
    if isinstance(error, WeightplaneError):
        return error
    return RemoteError(code="UNAVAILABLE", text=f"the stream ended early ({error!r})" if error else "it ended early")

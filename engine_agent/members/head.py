"""The agent's half: its members come to it, are told what to start, and are given each version's bytes.

Promises that a member that is lost is known within the keepalive's limits, and ends the engine's life: its cores hold
weights. Bytes that a member holds are those that were sent, by checksum, else the call fails before any worker is asked
to install. One version is held at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

import grpc
import structlog
import xxhash

from controlplane.core.access import Role, check_speaks_as
from controlplane.core.errors import (
    DeadlineExceeded,
    FrameOutOfOrder,
    InvalidRequest,
    PeerLost,
    UnknownEngine,
    WrongRun,
)
from controlplane.rpc.security import caller
from engine_agent.engine import SegmentSpan
from weightplane.local.v1 import member_pb2 as pb
from weightplane.local.v1 import member_pb2_grpc

log = structlog.get_logger(__name__)
T = TypeVar("T")

BLOCK_BYTES = 1 << 20
FRAMES_AHEAD = 4
"""Frames that wait for a slow member."""
ALIGNMENT_BYTES = 64
"""Of each span in a member's copy: more than any element needs."""


class MemberLink:
    """One member, for one life of the engine."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._out: asyncio.Queue[pb.AttachResponse] = asyncio.Queue(FRAMES_AHEAD)
        self._held: asyncio.Queue[pb.Held] = asyncio.Queue(1)

    def lose(self, cause: str) -> None:
        if not self.lost.done():
            self.lost.set_result(cause)

    async def listen(self, requests: AsyncIterator[pb.AttachRequest]) -> None:
        """Until the member says no more, which a killed one's kernel says for it."""
        try:
            async for request in requests:
                await self._held.put(request.held)
        finally:
            self.lose("its stream ended")

    async def frames(self) -> AsyncIterator[pb.AttachResponse]:
        while not self.lost.done():
            frame = asyncio.ensure_future(self._out.get())
            either: set[asyncio.Future[Any]] = {frame, self.lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if frame.done():
                yield frame.result()
            else:
                frame.cancel()

    async def launch(self, launch: pb.Launch) -> None:
        await self._send(pb.AttachResponse(launch=launch))

    async def put(self, spans: Sequence[SegmentSpan]) -> list[SegmentSpan]:
        """The same bytes on the member's node, span by span. Raises PeerLost, OSError."""
        starts, total = _packed(spans)
        await self._send(pb.AttachResponse(place=pb.Place(byte_count=total)))
        checksum = xxhash.xxh3_64()
        async for block in _blocks(spans, starts, total):
            checksum.update(block)
            await self._send(pb.AttachResponse(bytes=pb.Bytes(data=block)))
        await self._send(pb.AttachResponse(close=pb.Close(checksum=checksum.digest())))
        held = await self._or_lost(self._held.get())
        if held.problem:
            raise OSError(f"member {self.peer}: {held.problem}")
        return [SegmentSpan(held.path, start, s.byte_count) for s, start in zip(spans, starts, strict=True)]

    async def drop(self) -> None:
        await self._send(pb.AttachResponse(drop=pb.Drop()))

    async def _send(self, frame: pb.AttachResponse) -> None:
        await self._or_lost(self._out.put(frame))

    async def _or_lost(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self.lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.lost.done():
            task.cancel()
            raise PeerLost(self.peer, self.lost.result())
        return task.result()


class Members(member_pb2_grpc.EngineMembersServicer):
    """Of one engine, over all of its lives. `wanted` of them are taken; others are sent away."""

    def __init__(self, run_id: str, engine_id: str, wanted: int) -> None:
        self._run_id = run_id
        self._engine_id = engine_id
        self._wanted = wanted
        self._links: list[MemberLink] = []
        self._came = asyncio.Event()

    async def gather(self, limit_seconds: float) -> list[MemberLink]:
        """All of them, in the order of their coming. Raises DeadlineExceeded, with how many came."""
        try:
            async with asyncio.timeout(limit_seconds):
                while len(self._links) < self._wanted:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            what = f"{len(self._links)} of {self._wanted} members"
            raise DeadlineExceeded(what, f"the nodes of {self._engine_id}", limit_seconds) from None
        return list(self._links)

    def release(self) -> None:
        """This life of the engine is over: each member ends its cores and comes again."""
        for link in self._links:
            link.lose("the engine's life ended")
        self._links = []

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.AttachResponse]:
        self._admit(await anext(requests, None))
        link = MemberLink(context.peer())
        self._links.append(link)
        self._came.set()
        log.info("member_came", peer=link.peer, have=len(self._links), wanted=self._wanted)
        listening = asyncio.create_task(link.listen(requests))
        try:
            async for frame in link.frames():
                yield frame
        finally:
            link.lose("its stream ended")
            listening.cancel()
            self._links = [other for other in self._links if other is not link]
            log.info("member_gone", peer=link.peer, cause=link.lost.result())

    def _admit(self, first: pb.AttachRequest | None) -> None:
        frame = "the end" if first is None else str(first.WhichOneof("frame"))
        if first is None or frame != "hello":
            raise FrameOutOfOrder(expected="hello", got=frame)
        hello = first.hello
        if hello.run_id != self._run_id:
            raise WrongRun(expected=self._run_id, got=hello.run_id)
        if hello.engine_id != self._engine_id:
            raise UnknownEngine(engine_id=hello.engine_id)
        check_speaks_as(caller(), Role.ENGINE, hello.engine_id)
        if len(self._links) >= self._wanted:
            raise InvalidRequest("hello", f"{self._engine_id} has {self._wanted} members, and all of them are here")


def _packed(spans: Sequence[SegmentSpan]) -> tuple[list[int], int]:
    """Where each span begins in a member's copy, and the copy's size."""
    starts, end = [], 0
    for span in spans:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        starts.append(start)
        end = start + span.byte_count
    return starts, end


async def _blocks(spans: Sequence[SegmentSpan], starts: Sequence[int], total: int) -> AsyncIterator[bytes]:
    """The copy, from its first byte to its last."""
    at = 0
    for span, start in zip(spans, starts, strict=True):
        if start > at:
            yield bytes(start - at)
        with open(span.path, "rb", buffering=0) as file:  # noqa: ASYNC230 - shared memory: there is no disk to wait for
            file.seek(span.offset)
            left = span.byte_count
            while left:
                block = file.read(min(left, BLOCK_BYTES))
                if not block:
                    raise OSError(f"{span.path} is shorter than its span")
                yield block
                left -= len(block)
        at = start + span.byte_count
    assert at == total

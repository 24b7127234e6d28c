"""What leaders announce, kept for the streams: chunk by chunk, in order, and how far each stream has read.

Promises: any number of attempts reads a log from its first chunk on, as long as the leader keeps the bytes; a leader
that keeps two chunks hears that one may be written again only when every stream that reads its memory has read it
(INV-12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from controlplane.core.errors import FrameOutOfOrder, LimitExceeded
from weightplane.local.v1 import rank_pb2

MAX_CHUNKS = 1_000_000
"""Chunks of one push; 64 TiB in the default size, 16 TiB inline. They wait here as announced, since a stream may begin
anew."""


class ChunkLog:
    """What a leader announced for one engine, from the first chunk on, and how far its stream has read it."""

    def __init__(self, *, ring: bool = False, choice: bool = False) -> None:
        """`ring`: the leader keeps two chunks only. `choice`: the leader says first whether a delta comes."""
        self.ring = ring
        self.delta: bool | None = None if choice else False
        """What comes is a delta; None: the leader has not said yet."""
        self.read = -1
        """Chunks up to this one were read to the end; in a ring their bytes may be gone."""
        self.byte_count = 0
        """Bytes of what was announced."""
        self.rings: list[Ring] = []
        """Of the ranks whose memory the stream reads in place: they hear when it has read on."""
        self._chunks: list[rank_pb2.SendChunk] = []
        self._news = asyncio.Event()
        self.end: rank_pb2.PushEnd | None = None

    def add(self, chunk: rank_pb2.SendChunk) -> None:
        """Raises FrameOutOfOrder, LimitExceeded."""
        if self.delta is None:
            raise FrameOutOfOrder(expected="whether a delta comes", got=f"chunk {chunk.index}")
        if chunk.index != len(self._chunks) or self.end is not None:
            raise FrameOutOfOrder(expected=f"chunk {len(self._chunks)}", got=f"chunk {chunk.index}")
        if len(self._chunks) == MAX_CHUNKS:
            raise LimitExceeded(what="chunks of one push", limit=MAX_CHUNKS, got=MAX_CHUNKS + 1)
        self._chunks.append(chunk)
        self.byte_count += sum(r.byte_count for r in chunk.records)
        self._wake()

    def finish(self, end: rank_pb2.PushEnd) -> None:
        """Raises FrameOutOfOrder: chunks are missing."""
        if end.chunk_count != len(self._chunks):
            raise FrameOutOfOrder(expected=f"the end after {len(self._chunks)} chunks", got=f"{end.chunk_count}")
        self.end = end
        self._wake()

    def choose(self, *, delta: bool) -> None:
        """The leader's word. Raises FrameOutOfOrder: it was said before, or not asked for."""
        if self.delta is not None:
            raise FrameOutOfOrder(expected="a chunk", got="whether a delta comes")
        self.delta = delta
        self._wake()

    async def chosen(self) -> bool:
        """Whether a delta comes, once that is known."""
        while self.delta is None:
            await self._news.wait()
        return self.delta

    @property
    def whole(self) -> list[rank_pb2.SendChunk] | None:
        """Every chunk of a whole version, once the leader announced everything; else None."""
        return None if self.end is None or self.delta else self._chunks

    async def chunk(self, index: int) -> rank_pb2.SendChunk | None:
        """Chunk number `index`, once it is there; None after the last."""
        while index >= len(self._chunks):
            if self.end is not None:
                return None
            await self._news.wait()
        return self._chunks[index]

    @property
    def again(self) -> bool:
        """Whether a stream may begin anew at chunk 0: its bytes are certainly still there."""
        return not self.ring or self.read < 0

    def mark_read(self, index: int) -> None:
        """The stream needs the bytes of chunk `index` no more."""
        if index > self.read:
            before, self.read = self.read, index
            for ring in self.rings:
                ring.moved(before)

    def mark_over(self) -> None:
        """The stream will read nothing any more: nobody waits for it."""
        self.mark_read(MAX_CHUNKS)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Ring:
    """One rank that keeps two chunks: how far the streams that read its memory have read (INV-12).

    It follows those streams and no others: ranks that share no slot may cut a version differently, and one that waited
    for chunks which only another rank's weights complete would keep that one from its weights, which are read together.
    """

    def __init__(self, released: Callable[[int], None]) -> None:
        """`released(k)`: every chunk up to k may be written again. Called each time that k grows."""
        self._released = released
        self._logs: list[ChunkLog] = []
        self._least = -1
        """How far the slowest of them are, and how many are no further: of a thousand streams not all are looked at
        whenever one has read on."""
        self._slowest = 0

    def follow(self, log: ChunkLog) -> None:
        """One more; all of them are there before the first chunk comes."""
        self._logs.append(log)
        self._slowest += 1
        log.rings.append(self)

    def moved(self, before: int) -> None:
        """A stream has read on, which had read up to `before`."""
        if before > self._least:
            return
        self._slowest -= 1
        if self._slowest == 0:
            self._least = min(log.read for log in self._logs)
            self._slowest = sum(log.read == self._least for log in self._logs)
            if self._least < MAX_CHUNKS:
                self._released(self._least)

"""Ways: how one engine's stream carries what its leader announces, one class a transport, behind one port.

Promises: nothing about the update's fate, that is the stream's; each says whether engines read memory that the leader
handed out, and whether an attempt may be made again. Refuses transports that it does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from controlplane.core.errors import SlotMismatch
from trainer_agent.agent.chunk_log import ChunkLog
from trainer_agent.agent.frames import Frame, SegmentReader, by_reference, inline
from trainer_agent.transports import BROADCAST, CUDA_IPC, INLINE, SHARED_MEMORY
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, weight_update_pb2

ACCEPT_SECONDS = 30.0
"""An engine agent judges `open` without touching its engine."""
OPEN_SECONDS = 60.0
"""What it may take beyond that to have its workers open device memory: above what it gives them itself."""
MEET_SECONDS = 60.0
"""What it may take beyond that to meet everybody in a link, and to get the probe: above what both ends give themselves,
so that they say first what is wrong."""


class Way(Protocol):
    """One engine's, in one push."""

    hands_out: bool
    """Engines read the leader's own memory: it is in doubt while they may (INV-12)."""
    accept_seconds: float
    """Longest wait for the answer to `open`."""

    @property
    def again(self) -> bool:
        """Whether an attempt that was accepted may be followed by another, from chunk 0 on."""
        ...

    async def prepare(self, frame: weight_update_pb2.UpdateOpen) -> None:
        """Complete the open frame; waits for what it needs to know."""
        ...

    def cut(self, chunk: rank_pb2.SendChunk) -> Iterable[Frame]:
        """The chunk as frames of the stream."""
        ...

    def let_go(self, index: int) -> None:
        """The engine says that it reads chunk `index`, counted as it was sent, no more."""
        ...

    def sent(self, index: int) -> None:
        """Chunk `index` was handed over whole."""
        ...

    def close(self) -> None:
        """Let go of what was opened for reading."""
        ...


class ReadWhenSent:
    """What most ways do: the leader's memory was read, or is the stream's whole, when a chunk was handed over."""

    _chunks: ChunkLog

    def let_go(self, index: int) -> None:
        """The memory is judged by the stream's end."""

    def sent(self, index: int) -> None:
        self._chunks.mark_read(index)


class ByReference(ReadWhenSent):
    """shared_memory: handles go on as they came."""

    hands_out = True
    accept_seconds = ACCEPT_SECONDS
    again = True

    def __init__(self, assignment: fleet_pb2.Assignment, chunks: ChunkLog) -> None:
        self._chunks = chunks

    async def prepare(self, frame: weight_update_pb2.UpdateOpen) -> None:
        pass

    def cut(self, chunk: rank_pb2.SendChunk) -> Iterable[Frame]:
        return by_reference(chunk)

    def close(self) -> None:
        pass


class Inline(ReadWhenSent):
    """inline: the bytes are read here, out of the leader's memory, and travel in the frames."""

    hands_out = False
    accept_seconds = ACCEPT_SECONDS

    def __init__(self, assignment: fleet_pb2.Assignment, chunks: ChunkLog) -> None:
        self._chunks = chunks
        self._reader = SegmentReader()

    @property
    def again(self) -> bool:
        return self._chunks.again

    async def prepare(self, frame: weight_update_pb2.UpdateOpen) -> None:
        pass

    def cut(self, chunk: rank_pb2.SendChunk) -> Iterable[Frame]:
        return inline(chunk, self._reader)

    def close(self) -> None:
        self._reader.close()


class ByLink(ReadWhenSent):
    """broadcast: the bytes go over the leader's link, beside the stream; an engine comes to it once."""

    hands_out = False
    accept_seconds = ACCEPT_SECONDS + MEET_SECONDS
    again = False

    def __init__(self, assignment: fleet_pb2.Assignment, chunks: ChunkLog) -> None:
        self._chunks = chunks
        self._engine_id = assignment.engine.engine_id
        self._fate = assignment.fate
        self._made: asyncio.Future[rank_pb2.LinkMade] = asyncio.get_running_loop().create_future()

    def made(self, made: rank_pb2.LinkMade) -> None:
        """The leader listens."""
        if not self._made.done():
            self._made.set_result(made)

    async def prepare(self, frame: weight_update_pb2.UpdateOpen) -> None:
        made = await asyncio.shield(self._made)
        members = list(made.engine_ids)
        frame.link.link_id, frame.link.rendezvous, frame.link.fate = made.link_id, made.rendezvous, self._fate
        frame.link.size, frame.link.position = 1 + len(members), 1 + members.index(self._engine_id)

    def cut(self, chunk: rank_pb2.SendChunk) -> Iterable[Frame]:
        yield Frame(list(chunk.records), [b for b in chunk.buffers if b.HasField("link")])

    def close(self) -> None:
        self._made.cancel()


class ByDevice:
    """cuda_ipc: handles go on as they came. A half is free when the engine says that its workers let go (INV-12)."""

    hands_out = True
    accept_seconds = ACCEPT_SECONDS + OPEN_SECONDS

    def __init__(self, assignment: fleet_pb2.Assignment, chunks: ChunkLog) -> None:
        self._chunks = chunks
        self._made: asyncio.Future[rank_pb2.ExportsMade] = asyncio.get_running_loop().create_future()

    @property
    def again(self) -> bool:
        return self._chunks.again

    def made(self, made: rank_pb2.ExportsMade) -> None:
        """The slot's ranks have the memory."""
        if not self._made.done():
            self._made.set_result(made)

    async def prepare(self, frame: weight_update_pb2.UpdateOpen) -> None:
        made = await asyncio.shield(self._made)
        frame.exports.extend(made.exports)

    def cut(self, chunk: rank_pb2.SendChunk) -> Iterable[Frame]:
        return by_reference(chunk)

    def let_go(self, index: int) -> None:
        self._chunks.mark_read(index)

    def sent(self, index: int) -> None:
        """The workers read it from now on."""

    def close(self) -> None:
        self._made.cancel()


WAYS: Mapping[weight_update_pb2.Transport.ValueType, Callable[[fleet_pb2.Assignment, ChunkLog], Way]] = {
    SHARED_MEMORY: ByReference,
    INLINE: Inline,
    BROADCAST: ByLink,
    CUDA_IPC: ByDevice,
}


def make_way(assignment: fleet_pb2.Assignment, chunks: ChunkLog) -> Way:
    """The way of an assignment. Raises SlotMismatch: this trainer knows none."""
    require_known(assignment)
    return WAYS[assignment.transport](assignment, chunks)


def require_known(assignment: fleet_pb2.Assignment) -> None:
    """Raises SlotMismatch: the plan has a transport that this trainer does not know."""
    if assignment.transport not in WAYS:
        name = weight_update_pb2.Transport.Name(assignment.transport)
        raise SlotMismatch(
            engine_id=assignment.engine.engine_id, what="the plan's transport", ranks=f"none sends {name}"
        )

"""The port of the senders, what one is made of, and how a leader speaks to its agent.

Promises: a chunk is announced only when its bytes lie where the way takes them from, on every rank of the slot; the end
is announced once, with what was sent. Refuses nothing: what a part is, the plan says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from controlplane.core.errors import WeightplaneError
from controlplane.devices import host_id
from trainer_agent.parts import Part
from trainer_agent.rank.cuda_ipc import DeviceRings
from trainer_agent.rank.exporter import ExportedChunk
from trainer_agent.rank.gather import GatherGroups
from trainer_agent.rank.inbox import Inbox
from trainer_agent.rank.link import Patience, RankLink
from trainer_agent.rank.links import Links
from trainer_agent.segments import Segment
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import layout_pb2


class Sender(Protocol):
    """One part of one push. Calls may raise PushEnded, PeerLost, DeadlineExceeded and what the way can meet."""

    part: Part

    def send(self, chunk: ExportedChunk) -> None:
        """The chunk lies in memory: announce it, or put it on its way. Does not wait for its arrival."""
        ...

    def wait_free(self, index: int) -> None:
        """Return when nobody reads chunk `index` on this way any more (INV-12); asked only of a ring."""
        ...

    def finish(self, content: Content) -> None:
        """Every chunk was sent: say so, and see to it that what is on its way arrives."""
        ...


@dataclass(frozen=True, slots=True)
class Content:
    """What was exported, in the end."""

    chunk_count: int
    byte_count: int
    digest: bytes


class Announcer:
    """What a leader tells its agent."""

    def __init__(self, part: Part, link: RankLink, patience: Patience) -> None:
        self._part = part
        self._link = link
        self._patience = patience

    def chunk(self, chunk: ExportedChunk) -> rank_pb2.SendChunk:
        """The announcement, still without buffers."""
        return rank_pb2.SendChunk(engine_ids=self._part.engine_ids, index=chunk.index, records=chunk.records)

    def say(self, request: rank_pb2.RankRequest) -> None:
        self._link.send(request, self._patience)

    def failed(self, error: WeightplaneError) -> None:
        """What this rank cannot go on with."""
        failed = rank_pb2.PushFailed(cause=str(error), error_reason=error.reason, error_metadata=error.metadata())
        self.say(rank_pb2.RankRequest(push_failed=failed))

    def end(self, content: Content) -> None:
        end = rank_pb2.PushEnd(
            engine_ids=self._part.engine_ids,
            chunk_count=content.chunk_count,
            byte_count=content.byte_count,
            content_digest=content.digest,
        )
        self.say(rank_pb2.RankRequest(push_end=end))


def place_of(chunk: ExportedChunk, segment: Segment) -> layout_pb2.SharedMemoryRange:
    """Where the chunk lies on this host; `segment` is the push's own."""
    return layout_pb2.SharedMemoryRange(
        segment=(chunk.segment or segment).name, host_id=host_id(), offset=chunk.start, byte_count=chunk.byte_count
    )


@dataclass(frozen=True, slots=True)
class Means:
    """What the sender of a part works with."""

    part: Part
    rank: int
    """This one."""
    announcer: Announcer
    segment: Segment
    """The push's own: where chunks are exported to."""
    groups: GatherGroups
    links: Links
    inbox: Inbox
    rings: DeviceRings
    room_bytes: int
    """Of the largest chunk."""

"""Senders: how a rank's chunks go to the engines of one part, one class a way, behind one port.

Promises: a chunk is announced only when its bytes lie where the way takes them from, on every rank of the slot; the end
is announced once, with what was sent. Refuses nothing: what a part is, the plan says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from controlplane.core.errors import LinkFailed, WeightplaneError
from controlplane.devices import host_id
from trainer_agent.parts import Part
from trainer_agent.rank.exporter import ExportedChunk
from trainer_agent.rank.gather import GatherGroups
from trainer_agent.rank.inbox import Inbox
from trainer_agent.rank.link import Patience, RankLink
from trainer_agent.rank.links import Links
from trainer_agent.segments import Segment
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import layout_pb2, weight_update_pb2

log = structlog.get_logger(__name__)


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


class HandleSender:
    """shared_memory: every rank of the slot gives a handle, the leader announces all of them."""

    def __init__(
        self, part: Part, rank: int, announcer: Announcer, segment: Segment, groups: GatherGroups, inbox: Inbox
    ) -> None:
        self.part = part
        self._leads = part.leader == rank
        self._announcer = announcer
        self._segment = segment
        self._groups = groups
        self._inbox = inbox

    def send(self, chunk: ExportedChunk) -> None:
        place = place_of(chunk, self._segment)
        buffers = [layout_pb2.BufferHandle(device_uuid=self.part.device_uuid, shared_memory=place)]
        message = self._announcer.chunk(chunk)
        if len(self.part.ranks) > 1:
            content = message.SerializeToString(deterministic=True)
            mine = buffers[0].SerializeToString()
            merged = self._groups.merge(self.part.ranks, mine, content, self._inbox.check)
            buffers = [layout_pb2.BufferHandle.FromString(m) for m in merged]
        if self._leads:
            message.buffers.extend(buffers)
            self._announcer.say(rank_pb2.RankRequest(send_chunk=message))

    def wait_free(self, index: int) -> None:
        raise NotImplementedError("engines read these bytes until the update is over: they are never in a ring")

    def finish(self, content: Content) -> None:
        if self._leads:
            self._announcer.end(content)


class CopySender:
    """inline: the agent reads the leader's memory, and says when it has."""

    def __init__(self, part: Part, announcer: Announcer, segment: Segment, inbox: Inbox) -> None:
        self.part = part
        self._announcer = announcer
        self._segment = segment
        self._inbox = inbox

    def send(self, chunk: ExportedChunk) -> None:
        message = self._announcer.chunk(chunk)
        message.buffers.add(shared_memory=place_of(chunk, self._segment))
        self._announcer.say(rank_pb2.RankRequest(send_chunk=message))

    def wait_free(self, index: int) -> None:
        self._inbox.wait_released(index)

    def finish(self, content: Content) -> None:
        self._announcer.end(content)


class BroadcastSender:
    """broadcast: the chunk is announced, and its bytes go over the part's link, beside the stream.

    A link of shared fate that fails is the end of the push. One that is an engine's own ends that engine's bytes: the
    agent is told, and nothing more is sent there.
    """

    def __init__(self, part: Part, announcer: Announcer, segment: Segment, links: Links, inbox: Inbox) -> None:
        """Tells the engines where the link is, so that they come while others are told."""
        self.part = part
        self._announcer = announcer
        self._segment = segment
        self._memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._link = links.of(part)
        self._inbox = inbox
        self._lost = False
        announcer.say(rank_pb2.RankRequest(link_made=self._link.made()))

    def send(self, chunk: ExportedChunk) -> None:
        self._unless_lost(lambda: self._send(chunk))

    def wait_free(self, index: int) -> None:
        self._unless_lost(lambda: self._link.wait_sent(index, self._inbox.check))
        self._link.wait_still(index, self._inbox.check)

    def finish(self, content: Content) -> None:
        self._unless_lost(lambda: self._finish(content))

    def _send(self, chunk: ExportedChunk) -> None:
        if self._link.error is not None:
            raise self._link.error
        message = self._announcer.chunk(chunk)
        message.buffers.add(shared_memory=place_of(chunk, self._segment))
        message.buffers.add(link=layout_pb2.LinkBytes(byte_count=chunk.byte_count))
        self._announcer.say(rank_pb2.RankRequest(send_chunk=message))
        if chunk.byte_count:
            memory = (
                self._memory if chunk.segment is None else torch.frombuffer(chunk.segment.memory, dtype=torch.uint8)
            )
            data = memory[chunk.start : chunk.start + chunk.byte_count]
            self._link.send(chunk.index, data, self._inbox.check)

    def _finish(self, content: Content) -> None:
        self._announcer.end(content)
        self._link.wait_sent(content.chunk_count, self._inbox.check)

    def _unless_lost(self, act: Callable[[], None]) -> None:
        if self._lost:
            return
        try:
            act()
        except LinkFailed as error:
            if self.part.fate == weight_update_pb2.LINK_FATE_SHARED:
                raise
            log.warning("link_lost", link=self.part.link, cause=str(error))
            self._lost = True
            self._announcer.failed(error)

"""broadcast: a chunk is announced, and its bytes go over the part's link, beside the stream.

A link of shared fate that fails is the end of the push. One that is an engine's own ends that engine's bytes: the agent
is told, and nothing more is sent there.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import torch

from controlplane.core.errors import LinkFailed
from trainer_agent.rank.exporter import ExportedChunk
from trainer_agent.rank.senders.port import Content, Means, place_of
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import layout_pb2, weight_update_pb2

log = structlog.get_logger(__name__)


class BroadcastSender:
    """Over one link."""

    def __init__(self, means: Means) -> None:
        """Tells the engines where the link is, so that they come while others are told."""
        self.part = means.part
        self._announcer = means.announcer
        self._segment = means.segment
        self._memory = torch.frombuffer(means.segment.memory, dtype=torch.uint8)
        self._link = means.links.of(means.part)
        self._inbox = means.inbox
        self._lost = False
        self._announcer.say(rank_pb2.RankRequest(link_made=self._link.made()))

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

"""inline: the agent reads the leader's memory, and says when it has."""

from __future__ import annotations

from trainer_agent.rank.exporter import ExportedChunk
from trainer_agent.rank.senders.port import Content, Means, place_of
from weightplane.local.v1 import rank_pb2


class InlineSender:
    """By copy."""

    def __init__(self, means: Means) -> None:
        self.part = means.part
        self._means = means

    def send(self, chunk: ExportedChunk) -> None:
        message = self._means.announcer.chunk(chunk)
        message.buffers.add(shared_memory=place_of(chunk, self._means.segment))
        self._means.announcer.say(rank_pb2.RankRequest(send_chunk=message))

    def wait_free(self, index: int) -> None:
        self._means.inbox.wait_released(index)

    def finish(self, content: Content) -> None:
        self._means.announcer.end(content)

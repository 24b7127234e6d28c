"""shared_memory: every rank of the slot gives a handle, the leader announces all of them."""

from __future__ import annotations

from trainer_agent.rank.exporter import ExportedChunk
from trainer_agent.rank.senders.port import Content, Means, place_of
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import layout_pb2


class SharedMemorySender:
    """By reference."""

    def __init__(self, means: Means) -> None:
        self.part = means.part
        self._leads = means.part.leader == means.rank
        self._means = means

    def send(self, chunk: ExportedChunk) -> None:
        place = place_of(chunk, self._means.segment)
        buffers = [layout_pb2.BufferHandle(device_uuid=self.part.device_uuid, shared_memory=place)]
        message = self._means.announcer.chunk(chunk)
        if len(self.part.ranks) > 1:
            content = message.SerializeToString(deterministic=True)
            mine = buffers[0].SerializeToString()
            merged = self._means.groups.merge(self.part.ranks, mine, content, self._means.inbox.check)
            buffers = [layout_pb2.BufferHandle.FromString(m) for m in merged]
        if self._leads:
            message.buffers.extend(buffers)
            self._means.announcer.say(rank_pb2.RankRequest(send_chunk=message))

    def wait_free(self, index: int) -> None:
        raise NotImplementedError("engines read these bytes until the update is over: they are never in a ring")

    def finish(self, content: Content) -> None:
        if self._leads:
            self._means.announcer.end(content)

"""cuda_ipc: every rank of the slot brings the chunk into a half of its device memory, and the leader announces them.

Promises: a half is written only after every worker that reads it has let go of the chunk before the last (INV-12),
whatever becomes of the memory that the chunk was exported to: that is free when `send` returns.
"""

from __future__ import annotations

import torch

from controlplane.core.errors import IpcNotPossible
from controlplane.device_memory.port import DeviceMemoryError
from controlplane.device_memory.ranges import ExportedRange
from controlplane.rpc.device_codec import probe_to_proto, range_to_proto
from trainer_agent.rank.exporter import ExportedChunk
from trainer_agent.rank.memory import RING_CHUNKS
from trainer_agent.rank.senders.port import Content, Means
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import layout_pb2

EXPORTS = b"exports"
"""What ranks agree on when they hand each other their exports."""


class CudaIpcSender:
    """By reference, two chunks at a time."""

    def __init__(self, means: Means) -> None:
        """Tells the engines what to open, so that they try it while the first chunk is exported.

        Raises IpcNotPossible: there is no such memory, or it cannot be exported.
        """
        self.part = means.part
        self._leads = means.part.leader == means.rank
        self._means = means
        self._memory = torch.frombuffer(means.segment.memory, dtype=torch.uint8)
        self._ring = means.rings.acquire(means.room_bytes, ", ".join(self.part.engine_ids))
        mine = probe_to_proto(self._ring.probe)
        merged = self._merged(mine.SerializeToString(), EXPORTS)
        if self._leads:
            exports = [layout_pb2.DeviceExport.FromString(m) for m in merged]
            made = rank_pb2.ExportsMade(engine_ids=self.part.engine_ids, exports=exports)
            means.announcer.say(rank_pb2.RankRequest(exports_made=made))

    def send(self, chunk: ExportedChunk) -> None:
        if chunk.index >= RING_CHUNKS:
            self._means.inbox.wait_released(chunk.index - RING_CHUNKS)
        message = self._means.announcer.chunk(chunk)
        handle = range_to_proto(self._write(chunk))
        # An exchange is also how the leader knows that the chunk lies on every device.
        merged = self._merged(handle.SerializeToString(), message.SerializeToString(deterministic=True))
        if self._leads:
            message.buffers.extend(layout_pb2.BufferHandle.FromString(m) for m in merged)
            self._means.announcer.say(rank_pb2.RankRequest(send_chunk=message))

    def wait_free(self, index: int) -> None:
        """It was copied out when it was sent."""

    def finish(self, content: Content) -> None:
        if self._leads:
            self._means.announcer.end(content)

    def _write(self, chunk: ExportedChunk) -> ExportedRange:
        data = self._memory[chunk.start : chunk.start + chunk.byte_count]
        try:
            return self._ring.write(chunk.index, data)
        except (DeviceMemoryError, RuntimeError) as error:
            names, cause = ", ".join(self.part.engine_ids), str(error).partition("\n")[0]
            device = self._ring.probe.range.device_uuid
            raise IpcNotPossible(engine_id=names, device_uuid=device, cause=cause) from error

    def _merged(self, mine: bytes, content: bytes) -> list[bytes]:
        """Every rank's, in the order of the slot's ranks."""
        if len(self.part.ranks) == 1:
            return [mine]
        return self._means.groups.merge(self.part.ranks, mine, content, self._means.inbox.check)

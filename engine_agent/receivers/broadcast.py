"""Broadcast: bytes come over the update's link, straight to their places in memory of the agent's own.

Where a chunk is a run of whole places, one after the other as the layout has them, the operation writes into the
staging itself; any other chunk goes through a buffer. Nothing is read of the sender's memory but by the link's own
operations, so a chunk is released when it was placed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from controlplane.core.assembly import Record
from controlplane.core.errors import ByteCountMismatch, FrameInvalid
from engine_agent.engine import StagedWeights
from engine_agent.receivers.links import ReceiverLink
from engine_agent.receivers.port import Buffer, require_open
from engine_agent.receivers.staging import ALIGNMENT_BYTES, Staging


class BroadcastReceiver:
    """By copy. `close` does not wait for a broadcast: it ends the link, unless everything has come."""

    releases_at_once = True
    quick = False
    keeps = True

    def __init__(self, staging: Staging, link: ReceiverLink) -> None:
        """The room is closed with this."""
        self._layout = staging.layout
        self._link = link
        self._staging = staging
        self._buffer = bytearray()
        self._left = staging.layout.byte_count
        self._guard = threading.Lock()
        """Held while the staging is used, never while a broadcast is waited for."""
        self._closed = False

    def place(self, records: Sequence[Record], buffers: Sequence[Buffer]) -> None:
        if len(buffers) != 1 or buffers[0].link_bytes is None:
            raise FrameInvalid("Chunk", "buffers", "a broadcast has its bytes on the link")
        size = buffers[0].link_bytes
        if size > self._staging.size:
            raise ByteCountMismatch(what="a chunk on the link", expected=self._staging.size, got=size)
        self._staging.fill(self._guard)
        straight = self._straight(records, size)
        target = self._target(size, straight)
        try:
            if size:
                self._link.receive(target)
            self._came(records, None if straight is not None else target)
        finally:
            del target  # an error's traceback must not hold a version's memory

    def _target(self, size: int, straight: int | None) -> memoryview:
        with self._guard:
            require_open(self._closed)
            return self._room(size) if straight is None else self._staging.view[straight : straight + size]

    def _came(self, records: Sequence[Record], data: memoryview | None) -> None:
        """`data`: still to be copied to its places."""
        with self._guard:
            require_open(self._closed)
            if data is not None:
                self._staging.copy(records, data)
            self._left -= sum(r.byte_count for r in records)
            if self._left == 0 or (self._staging.patched and not records):  # the last chunk of a delta is empty
                self._link.all_came()

    def check(self, tensor: int, expected: bytes) -> None:
        with self._guard:
            require_open(self._closed)
            self._staging.check(tensor, expected)

    def staged(self, label: str) -> StagedWeights:
        return self._staging.staged(label)

    def installed(self) -> None:
        self._staging.installed = True

    def close(self) -> None:
        self._link.leave()
        with self._guard:
            self._closed = True
            self._staging.close()

    def _room(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def _straight(self, records: Sequence[Record], size: int) -> int | None:
        """Where the chunk lies as a whole; None: it has other gaps than the staging, and must not overwrite them."""
        if not records or self._staging.patched:
            return None
        begin = self._staging.offsets[records[0].tensor] + records[0].tensor_offset - records[0].buffer_offset
        end = begin
        for r in records:
            start = self._staging.offsets[r.tensor] + r.tensor_offset
            if start - begin != r.buffer_offset or start != end:
                return None
            last = r.tensor_offset + r.byte_count == self._layout.tensors[r.tensor].byte_count
            end = start + r.byte_count
            end = _aligned(end) if last else end
        return begin if end - begin == size and begin + size <= self._staging.size else None


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

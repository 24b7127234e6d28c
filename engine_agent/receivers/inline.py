"""Inline: bytes come inside the stream's messages and are copied once, into memory of the agent's own.

The copy is an unnamed shared-memory file: workers map it through this process's descriptor table, and it vanishes with
the last process that has it open, however that ends.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

import xxhash

from controlplane.core.assembly import Record
from controlplane.core.errors import ByteCountMismatch, FrameInvalid, LimitExceeded
from controlplane.core.layout import Layout
from engine_agent.engine import Placement, SegmentSpan, StagedWeights
from engine_agent.receivers.port import Buffer, require_equal, require_open

ALIGNMENT_BYTES = 64
"""Tensors start at multiples of this, so that views of any dtype can be made of them."""


class InlineReceiver:
    """By copy: a chunk's memory at the sender is free as soon as it was placed."""

    releases_at_once = True

    def __init__(self, layout: Layout) -> None:
        """Reserves the layout's size at once. Raises LimitExceeded when memory does not suffice."""
        self._layout = layout
        self._offsets, self._size = _offsets(layout)
        self._descriptor = os.memfd_create("weightplane-inline", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._descriptor, 0, self._size)
            self._map = mmap.mmap(self._descriptor, self._size)
        except OSError as error:
            os.close(self._descriptor)
            raise LimitExceeded(what="memory for staged weights, bytes", limit=0, got=self._size) from error
        self._view = memoryview(self._map)
        self._in_use = threading.Lock()

    def place(self, records: Sequence[Record], buffers: Sequence[Buffer]) -> None:
        if len(buffers) != 1 or buffers[0].inline is None:
            raise FrameInvalid("Chunk", "buffers", "the inline transport has its bytes in one buffer")
        data = memoryview(buffers[0].inline)
        with self._in_use:
            require_open(self._descriptor < 0)
            self._copy(records, data)

    def _copy(self, records: Sequence[Record], data: memoryview) -> None:
        for r in records:
            part = data[r.buffer_offset : r.buffer_offset + r.byte_count]
            if len(part) != r.byte_count:
                raise ByteCountMismatch(what="inline buffer", expected=r.byte_count, got=len(part))
            start = self._offsets[r.tensor] + r.tensor_offset
            self._view[start : start + r.byte_count] = part

    def check(self, tensor: int, expected: bytes) -> None:
        start = self._offsets[tensor]
        with self._in_use:
            require_open(self._descriptor < 0)
            got = xxhash.xxh3_64_digest(self._view[start : start + self._layout.tensors[tensor].byte_count])
        require_equal(self._layout, tensor, expected, got)

    def staged(self, label: str) -> StagedWeights:
        span = SegmentSpan(f"/proc/{os.getpid()}/fd/{self._descriptor}", 0, self._size)
        placements = [Placement(0, offset) for offset in self._offsets]
        return StagedWeights(layout=self._layout, label=label, chunks={"": [span]}, placements=placements)

    def close(self) -> None:
        with self._in_use:
            if self._descriptor >= 0:
                self._view.release()
                self._map.close()
                os.close(self._descriptor)
                self._descriptor = -1


def _offsets(layout: Layout) -> tuple[list[int], int]:
    offsets, end = [], 0
    for tensor in layout.tensors:
        offsets.append(end)
        end += -(-tensor.byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, max(end, 1)

"""Staging: a whole version's bytes in memory of the agent's own, for receivers that copy.

It is an unnamed shared-memory file: workers map it through this process's descriptor table, and it vanishes with the
last process that has it open, however that ends. Tensors lie in the order of the layout, each aligned.

Pages cost more than what is written to them: the memory of a version that was installed may be the next one's
(`Spare`). That of any other is not, since somebody may still read it (INV-12).
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import xxhash

from controlplane.core.assembly import Record
from controlplane.core.errors import ByteCountMismatch, LimitExceeded
from controlplane.core.layout import Layout
from engine_agent.engine import Placement, SegmentSpan, StagedPart, StagedWeights
from engine_agent.receivers.port import require_equal
from engine_agent.receivers.spare import Spare, StagingMemory

ALIGNMENT_BYTES = 64
"""Tensors start at multiples of this, so that views of any dtype can be made of them."""


class Staging:
    """Room for a layout. Not for use by several threads at once; `close` comes when nobody uses it."""

    patched = False
    """It begins as a copy of a base; what comes is a delta."""

    installed = False
    """Its version was installed, whole: no worker reads it any more."""

    def __init__(self, layout: Layout, *, reserve: bool = True, spare: Spare | None = None) -> None:
        """Reserves the layout's size at once, or, without `reserve`, takes memory as bytes come. `spare`: where the
        memory comes from, if it is there, and goes to.

        Raises LimitExceeded when memory does not suffice.
        """
        self.layout = layout
        self.offsets, self.size = _offsets(layout)
        self._spare = spare
        kept = None if spare is None else spare.take(self.size)
        memory = _made(self.size, reserve=reserve) if kept is None else kept
        self._descriptor, self._map = memory.descriptor, memory.mapping
        self.view = memoryview(self._map)

    @property
    def closed(self) -> bool:
        return self._descriptor < 0

    def fill(self, guard: threading.Lock) -> None:
        """Bring here what must lie here before the first chunk. Takes the guard for a while, again and again."""

    def copy(self, records: Sequence[Record], data: memoryview) -> None:
        """Bring a chunk's bytes to their places. Raises ByteCountMismatch: it has fewer than its records say."""
        for r in records:
            part = data[r.buffer_offset : r.buffer_offset + r.byte_count]
            if len(part) != r.byte_count:
                raise ByteCountMismatch(what="the chunk's buffer", expected=r.byte_count, got=len(part))
            start = self.offsets[r.tensor] + r.tensor_offset
            self.view[start : start + r.byte_count] = part

    def check(self, tensor: int, expected: bytes) -> None:
        """Raises ChecksumMismatch (M3)."""
        start = self.offsets[tensor]
        got = xxhash.xxh3_64_digest(self.view[start : start + self.layout.tensors[tensor].byte_count])
        require_equal(self.layout, tensor, expected, got)

    def staged(self, label: str) -> StagedWeights:
        span = SegmentSpan(f"/proc/{os.getpid()}/fd/{self._descriptor}", 0, self.size)
        placements = [Placement(0, offset) for offset in self.offsets]
        return StagedWeights(layout=self.layout, label=label, chunks={"": [span]}, placements=placements)

    def part(self, tensors: Sequence[int]) -> StagedPart:
        span = SegmentSpan(f"/proc/{os.getpid()}/fd/{self._descriptor}", 0, self.size)
        return StagedPart({"": [span]}, tensors, [Placement(0, self.offsets[t]) for t in tensors])

    def forget(self, tensors: Sequence[int]) -> None:
        """Give these tensors' whole pages back. They read as zeros from here on."""
        for tensor in tensors:
            begin = -(-self.offsets[tensor] // mmap.PAGESIZE) * mmap.PAGESIZE
            end = self.offsets[tensor] + self.layout.tensors[tensor].byte_count
            if (size := (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE) > 0:
                self._map.madvise(mmap.MADV_REMOVE, begin, size)

    def close(self) -> None:
        """Let go. Idempotent."""
        if self._descriptor < 0:
            return
        memory = StagingMemory(self._descriptor, self._map)
        self._descriptor = -1
        with suppress(BufferError):
            self.view.release()
        if self._spare is not None and self.installed:
            self._spare.give(memory)
        else:
            memory.close()


def _made(size: int, *, reserve: bool) -> StagingMemory:
    descriptor = os.memfd_create("weightplane-staging", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        if reserve:
            os.posix_fallocate(descriptor, 0, size)
        return StagingMemory(descriptor, mmap.mmap(descriptor, size))
    except OSError as error:
        os.close(descriptor)
        raise LimitExceeded(what="memory for staged weights, bytes", limit=0, got=size) from error


def _offsets(layout: Layout) -> tuple[list[int], int]:
    offsets, end = [], 0
    for tensor in layout.tensors:
        offsets.append(end)
        end += -(-tensor.byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, max(end, 1)

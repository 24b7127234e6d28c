"""Where each tensor lies in a rank's segment, and which ranges of it are chunks. Pure arithmetic over a layout.

Promises: every tensor lies whole and contiguous, 64-byte aligned; the chunks tile the segment in order, so a tensor
that is split over chunks is still contiguous. Sizes come from declared shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from controlplane.core.layout import Layout

ALIGNMENT_BYTES = 64
"""Any element type can be viewed at such an offset, and it is a cache line."""
MAX_RECORDS = 4096
"""Records of one chunk: the contract's limit."""
DEFAULT_CHUNK_BYTES = 64 * 1024 * 1024
"""Large enough that announcing costs nothing, small enough that checking overlaps with exporting."""
TAIL_BYTES = 8 * 1024 * 1024
"""Towards the end each chunk has half of what is left, down to this: the last one is what everybody waits for when
nothing is left to export."""

FIRST_BYTES = 4 * 1024 * 1024
"""Where bytes travel while the next are exported: nothing leaves before the first chunk was copied and summed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's bytes that lies in one chunk."""

    tensor: int
    """Index into the layout."""
    tensor_offset: int
    segment_offset: int
    byte_count: int
    last: bool
    """Whether it completes its tensor."""


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Bytes [start, end) of the segment."""

    start: int
    end: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The whole segment."""

    byte_count: int
    offsets: tuple[int, ...]
    """First byte of each tensor, in layout order."""
    chunks: tuple[ChunkRange, ...]


def plan_segment(layout: Layout, chunk_bytes: int = DEFAULT_CHUNK_BYTES, first_bytes: int | None = None) -> SegmentPlan:
    """Lay a layout out in one segment, in chunks of at most `chunk_bytes` (rounded down to the alignment), less towards
    the end. With `first_bytes` the first chunk has at most so many, and each one after it at most as many as all before
    it have together.

    Raises:
        ValueError: chunk_bytes is below the alignment, or the layout has no tensor.
    """
    if chunk_bytes < ALIGNMENT_BYTES:
        raise ValueError(f"a chunk holds at least {ALIGNMENT_BYTES} bytes, not {chunk_bytes}")
    if not layout.tensors:
        raise ValueError("a layout without tensors cannot be exported")
    sizes = [t.byte_count for t in layout.tensors]
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end = _aligned(end + size)
    largest = chunk_bytes - chunk_bytes % ALIGNMENT_BYTES
    first = largest if first_bytes is None else max(ALIGNMENT_BYTES, first_bytes - first_bytes % ALIGNMENT_BYTES)
    chunks = tuple(_cut(offsets, sizes, _Limits(first, largest, end)))
    return SegmentPlan(byte_count=end, offsets=tuple(offsets), chunks=chunks)


@dataclass(frozen=True, slots=True)
class _Limits:
    first: int
    largest: int
    end: int
    """Of the segment."""

    def at(self, start: int) -> int:
        """Bytes of the chunk that begins there, at most."""
        half = (self.end - start) // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return min(self.largest, max(self.first, start), max(TAIL_BYTES, half))


def _cut(offsets: list[int], sizes: list[int], limits: _Limits) -> Iterator[ChunkRange]:
    start, limit = 0, limits.at(0)
    pieces: list[Piece] = []
    for index, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if pieces and (offset + size - start > limit or len(pieces) == MAX_RECORDS):
            yield ChunkRange(start, offset, tuple(pieces))
            start, pieces, limit = offset, [], limits.at(offset)
        done = 0
        while size - done > limit:
            piece = Piece(index, done, offset + done, limit, last=False)
            yield ChunkRange(start, start + limit, (piece,))
            start += limit
            done += limit
            limit = limits.at(start)
        pieces.append(Piece(index, done, offset + done, size - done, last=True))
    yield ChunkRange(start, limits.end, tuple(pieces))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

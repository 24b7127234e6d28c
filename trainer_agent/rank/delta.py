"""What changed between two versions of one layout, as the chunks of a delta. Pure over memory that others own.

Promises: lossless. Elements are compared by their bits, never as numbers: a NaN that stays is unchanged, and -0.0 for
0.0 is a change. A tensor goes as its changed elements, or whole where that is smaller, or not at all. A record of
changed elements is never larger than RECORD_BYTES, so that it goes into one frame of any transport, and its indexes
count from its own first element, so that int32 suffices for any tensor. Nothing is sent here: whoever wrote it chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from controlplane.core.assembly import INDEX_BYTES
from controlplane.core.layout import Layout
from trainer_agent.chunking import MAX_RECORDS
from trainer_agent.rank.memory import Place
from weightplane.v1 import weight_update_pb2 as pb

DELTA_WORTH = 0.7
"""A delta of more than this part of the whole version's bytes is not worth it: applying one costs time, too."""
RECORD_BYTES = 512 * 1024
"""Of one record of changed elements; half of an inline frame."""
MAX_SPAN = 2**31
"""Elements that one record's indexes can reach over."""
BLOCK_ELEMENTS = 1 << 24
"""Compared at once: what is found takes eight bytes an element until it is written."""
ALIGNMENT_BYTES = 8
"""Of a record in its chunk."""
SMALL_BYTES = 4096
"""Room at the end of a chunk that is not worth a piece of a tensor."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class DeltaChunk:
    """A chunk whose bytes are the first `byte_count` of its place."""

    index: int
    place: Place
    byte_count: int
    records: tuple[pb.TensorRecord, ...]


class DeltaWriter:
    """Takes tensor after tensor, old and new, and writes what changed, each chunk into a place of its own."""

    def __init__(self, layout: Layout, chunk_bytes: int, new_place: Callable[[int], Place]) -> None:
        """`new_place` gives memory of at least the bytes that it is asked for.

        Raises ValueError: a chunk would not hold one element.
        """
        if chunk_bytes < 2 * ALIGNMENT_BYTES:
            raise ValueError(f"a chunk holds at least {2 * ALIGNMENT_BYTES} bytes, not {chunk_bytes}")
        whole = layout.byte_count + ALIGNMENT_BYTES * len(layout.tensors)
        self._layout = layout
        self._chunk_bytes = min(chunk_bytes, _aligned(whole)) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._new_place = new_place
        self._place: Place | None = None
        self._used = 0
        self._records: list[pb.TensorRecord] = []
        self._chunks: list[DeltaChunk] = []
        self.byte_count = 0
        """Of all records."""
        self.changed_elements = 0
        self.changed_tensors = 0

    @property
    def worth_it(self) -> bool:
        """It is so much smaller than the whole version that sending it pays."""
        return self.byte_count <= DELTA_WORTH * self._layout.byte_count

    def add(self, tensor: int, old: torch.Tensor, new: torch.Tensor, checksum: bytes) -> None:
        """Write what changed of a tensor: its bytes before and after (uint8, one dimension), its new checksum.

        Raises what `new_place` raises.
        """
        spec = self._layout.tensors[tensor]
        bits = _BITS[spec.dtype.item_bytes]
        found = changed(old.view(bits), new.view(bits))
        if not len(found):
            return
        self.changed_tensors += 1
        self.changed_elements += len(found)
        if len(found) * (INDEX_BYTES + spec.dtype.item_bytes) < spec.byte_count:
            self._write_elements(tensor, found, new.view(bits), checksum)
        else:
            self._write_whole(tensor, new, checksum)

    def finish(self) -> list[DeltaChunk]:
        """Every chunk, in order; none if nothing changed."""
        if self._records:
            self._end_chunk()
        return self._chunks

    def _write_elements(self, tensor: int, found: torch.Tensor, new: torch.Tensor, checksum: bytes) -> None:
        item = new.element_size()
        limit = max(min(RECORD_BYTES, self._chunk_bytes) // (INDEX_BYTES + item), 1)
        for run in _runs(found, limit):
            first, values = int(run[0]), new.index_select(0, run)
            indexes = (run - first).to(torch.int32)
            record = pb.TensorRecord(tensor=tensor, tensor_offset=first * item, changed_elements=len(run))
            if run[-1] == found[-1]:
                record.checksum = checksum
            self._write(record, indexes.view(torch.uint8), values.view(torch.uint8))

    def _write_whole(self, tensor: int, new: torch.Tensor, checksum: bytes) -> None:
        done = 0
        while done < len(new):
            room = self._chunk_bytes - _aligned(self._used)
            if self._place is None or room < min(len(new) - done, SMALL_BYTES):
                room = self._chunk_bytes
            piece = new[done : done + room]
            record = pb.TensorRecord(tensor=tensor, tensor_offset=done)
            done += len(piece)
            if done == len(new):
                record.checksum = checksum
            self._write(record, piece)

    def _write(self, record: pb.TensorRecord, *parts: torch.Tensor) -> None:
        size = sum(map(len, parts))
        if self._place is not None and (
            _aligned(self._used) + size > self._chunk_bytes or len(self._records) == MAX_RECORDS
        ):
            self._end_chunk()
        if self._place is None:
            self._place = self._new_place(self._chunk_bytes)
        start = _aligned(self._used)
        record.buffer_offset, record.byte_count = start, size
        target = torch.frombuffer(self._place.memory, dtype=torch.uint8)
        for part in parts:
            target[start : start + len(part)].copy_(part)
            start += len(part)
        self._used = start
        self._records.append(record)
        self.byte_count += size

    def _end_chunk(self) -> None:
        assert self._place is not None, "a chunk with records has its place"
        self._chunks.append(DeltaChunk(len(self._chunks), self._place, self._used, tuple(self._records)))
        self._place, self._used, self._records = None, 0, []


def changed(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Indexes (int64, rising) of the elements that differ, of two tensors of bits."""
    blocks = []
    for start in range(0, len(new), BLOCK_ELEMENTS):
        end = start + BLOCK_ELEMENTS
        found = torch.nonzero(old[start:end] != new[start:end]).flatten()
        blocks.append(found + start if start else found)
    return torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.int64)


def _runs(found: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """The indexes in runs of at most `limit`, each reaching over less than MAX_SPAN elements."""
    start = 0
    while start < len(found):
        run = found[start : start + limit]
        run = run[: int(torch.searchsorted(run, int(run[0]) + MAX_SPAN))]
        yield run
        start += len(run)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

"""From what a leader announces to what an engine's stream carries: handles as they are, or the bytes themselves.

By shared memory a chunk goes on as the leader made it. Inline, the agent reads the leader's segment (it lives
on the same host) and cuts it into frames of at most 1 MiB with their own numbering; padding does not travel.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from controlplane.core.errors import SegmentUnreadable
from controlplane.devices import SHARED_MEMORY
from controlplane.rpc.bulk import with_payload
from trainer_agent.chunking import MAX_RECORDS
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import layout_pb2, weight_update_pb2

INLINE_BYTES = 1024 * 1024
"""Payload of one inline frame: the contract's limit, and bigger ones were not faster."""
_SEGMENT = re.compile(r"weightplane-[A-Za-z0-9._-]+")


class SegmentReader:
    """Reads ranges of segments of this host; keeps each mapped until `close`."""

    def __init__(self) -> None:
        self._mapped: dict[str, mmap.mmap] = {}

    def read(self, place: layout_pb2.SharedMemoryRange, offset: int, byte_count: int) -> bytes:
        """`byte_count` bytes from `offset` of the range on.

        Raises:
            SegmentUnreadable: it is gone, or shorter than that.
        """
        with self.view(place, offset, byte_count) as bytes_there:
            return bytes(bytes_there)

    def view(self, place: layout_pb2.SharedMemoryRange, offset: int, byte_count: int) -> memoryview:
        """The same, where they lie; to be released before `close`."""
        mapping = self._mapped.get(place.segment) or self._map(place.segment)
        start = place.offset + offset
        if offset + byte_count > place.byte_count or start + byte_count > len(mapping):
            raise SegmentUnreadable(segment=place.segment, cause=f"{byte_count} bytes at {start} are not in it")
        return memoryview(mapping)[start : start + byte_count]

    def close(self) -> None:
        for mapping in self._mapped.values():
            with suppress(BufferError):  # an attempt that was ended still has a view of it, and goes with that
                mapping.close()
        self._mapped.clear()

    def _map(self, name: str) -> mmap.mmap:
        if _SEGMENT.fullmatch(name) is None:
            raise SegmentUnreadable(segment=name, cause="it is no name of ours")
        try:
            descriptor = os.open(Path(SHARED_MEMORY, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise SegmentUnreadable(segment=name, cause=error.strerror or str(error)) from error
        try:
            self._mapped[name] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        return self._mapped[name]


@dataclass(frozen=True, slots=True)
class Frame:
    """One chunk frame, in the making."""

    records: list[weight_update_pb2.TensorRecord]
    buffers: list[layout_pb2.BufferHandle]
    """Where the records' bytes lie."""
    payload: tuple[memoryview, ...] | None = None
    """The bytes themselves, one after the other, in place of buffers. They lie in the leader's memory: valid until the
    next frame is asked for."""

    def message(self, head: weight_update_pb2.Chunk) -> weight_update_pb2.UpdateWeightsRequest | bytes:
        """For the wire. `head`: the chunk's other fields."""
        head.records.extend(self.records)
        if self.payload is not None:
            return with_payload(head, self.payload)
        head.buffers.extend(self.buffers)
        return weight_update_pb2.UpdateWeightsRequest(chunk=head)


def by_reference(chunk: rank_pb2.SendChunk) -> Iterator[Frame]:
    """The chunk as it was announced."""
    yield Frame(list(chunk.records), list(chunk.buffers))


def inline(chunk: rank_pb2.SendChunk, reader: SegmentReader) -> Iterator[Frame]:
    """The chunk's bytes in frames of at most INLINE_BYTES. An empty chunk is one empty frame.

    Raises:
        SegmentUnreadable.
    """
    place = chunk.buffers[0].shared_memory
    for run in _runs(chunk.records):
        payload = tuple(reader.view(place, source, r.byte_count) for r, source in run)
        try:
            yield Frame([r for r, _ in run], [], payload)
        finally:
            for piece in payload:
                piece.release()


def _runs(
    records: Iterable[weight_update_pb2.TensorRecord],
) -> Iterator[list[tuple[weight_update_pb2.TensorRecord, int]]]:
    """Records re-based to frames, each with the offset in the chunk that its bytes come from."""
    run: list[tuple[weight_update_pb2.TensorRecord, int]] = []
    used = 0
    for record in records:
        done = 0
        changed = record.HasField("changed_elements")  # indexes and values: never cut, and small (rank/delta.py)
        while True:
            full = used == INLINE_BYTES or (changed and used + record.byte_count > INLINE_BYTES)
            if (full and run) or len(run) == MAX_RECORDS:
                yield run
                run, used = [], 0
            size = record.byte_count if changed else min(record.byte_count - done, INLINE_BYTES - used)
            last = done + size == record.byte_count
            run.append((_part(record, done, used, size, last=last), record.buffer_offset + done))
            used += size
            done += size
            if last:
                break
    yield run


def _part(
    record: weight_update_pb2.TensorRecord, done: int, used: int, size: int, *, last: bool
) -> weight_update_pb2.TensorRecord:
    part = weight_update_pb2.TensorRecord(
        tensor=record.tensor, tensor_offset=record.tensor_offset + done, buffer_offset=used, byte_count=size
    )
    if last and record.HasField("checksum"):
        part.checksum = record.checksum
    if record.HasField("changed_elements"):
        part.changed_elements = record.changed_elements
    return part

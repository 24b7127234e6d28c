"""Keeping account of an update's bytes: what came, what is missing, and that nothing came twice.

Pure book-keeping over chunk records; the bytes themselves are elsewhere. A tensor's records come in
order and without gaps; a tensor may go over several chunks; an empty chunk is legal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.core.errors import ByteCountMismatch, FrameInvalid, FrameOutOfOrder, ManifestIncomplete
from controlplane.core.layout import Layout, content_digest


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor's bytes in a chunk; see TensorRecord in weight_update.proto."""

    tensor: int
    tensor_offset: int
    buffer_offset: int
    byte_count: int
    checksum: bytes | None


class Assembly:
    """The account of one attempt."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.chunk_count = 0
        self.byte_count = 0
        self._received = [0] * len(layout.tensors)
        self._checksums: list[bytes | None] = [None] * len(layout.tensors)
        self._complete = 0

    def add(self, index: int, records: Sequence[Record], buffer_bytes: int) -> list[int]:
        """Book one chunk. Returns the tensors that it completed, in the order of its records.

        Raises:
            FrameOutOfOrder: the chunk is not the next one, or a tensor's record is not.
            FrameInvalid: a record names no tensor, or has a checksum too many or too few.
            ByteCountMismatch: a record passes the end of its tensor or of the buffer.
        """
        if index != self.chunk_count:
            raise FrameOutOfOrder(expected=f"chunk {self.chunk_count}", got=f"chunk {index}")
        received: dict[int, int] = {}
        for record in records:  # all are judged before one is booked: a refusal leaves the account as it was
            received[record.tensor] = self._judge(record, received.get(record.tensor), buffer_bytes)
        for record in records:
            self._received[record.tensor] += record.byte_count
            self.byte_count += record.byte_count
            if record.checksum is not None:
                self._checksums[record.tensor] = record.checksum
                self._complete += 1
        self.chunk_count += 1
        return [r.tensor for r in records if r.checksum is not None]

    def _judge(self, record: Record, received_here: int | None, buffer_bytes: int) -> int:
        """Bytes of the tensor that have come with this record; `received_here` after earlier ones of the chunk."""
        if record.tensor >= len(self._received):
            raise FrameInvalid("TensorRecord", "tensor", f"the layout has {len(self._received)} tensors")
        spec = self.layout.tensors[record.tensor]
        have = self._received[record.tensor] if received_here is None else received_here
        if self._checksums[record.tensor] is not None or (received_here is not None and have == spec.byte_count):
            raise FrameOutOfOrder(expected="a tensor not yet complete", got=f"more of {spec.name}")
        if record.tensor_offset != have:
            raise FrameOutOfOrder(
                expected=f"{spec.name} from byte {have}", got=f"{spec.name} from byte {record.tensor_offset}"
            )
        end = have + record.byte_count
        if end > spec.byte_count:
            raise ByteCountMismatch(what=spec.name, expected=spec.byte_count, got=end)
        if record.buffer_offset + record.byte_count > buffer_bytes:
            raise ByteCountMismatch(
                what=f"buffer with {spec.name}", expected=record.buffer_offset + record.byte_count, got=buffer_bytes
            )
        if (end == spec.byte_count) != (record.checksum is not None):
            raise FrameInvalid("TensorRecord", "checksum", f"belongs on the record that completes {spec.name}")
        return end

    @property
    def complete(self) -> bool:
        """Every tensor of the layout is whole (INV-1: covered name by name)."""
        return self._complete == len(self._checksums)

    def checksum(self, tensor: int) -> bytes:
        """The sender's checksum of a completed tensor."""
        value = self._checksums[tensor]
        if value is None:
            raise LookupError(f"tensor {tensor} is not complete")
        return value

    def digest(self) -> bytes:
        """Content digest of what came.

        Raises:
            ManifestIncomplete: tensors are missing or partial.
        """
        missing = [t.name for t, c in zip(self.layout.tensors, self._checksums, strict=True) if c is None]
        if missing:
            raise ManifestIncomplete(names=missing, expected=len(self._checksums), got=self._complete)
        return content_digest([c for c in self._checksums if c is not None])

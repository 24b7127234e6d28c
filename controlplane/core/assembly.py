"""Keeping account of an update's bytes: what came, what is missing, and that nothing came twice.

Pure book-keeping over chunk records; the bytes themselves are elsewhere. A tensor's records come in
order and without gaps; a tensor may go over several chunks; an empty chunk is legal.

Of a delta: a tensor comes whole, or as records of changed elements, which rise through it, or not at all; then it stays
as it is in the base, checksum and all. What came is complete when the writer says that nothing follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.core.errors import ByteCountMismatch, FrameInvalid, FrameOutOfOrder, ManifestIncomplete
from controlplane.core.layout import Layout, TensorSpec, content_digest

INDEX_BYTES = 4
"""An index of a changed element: int32."""


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor's bytes in a chunk; see TensorRecord in weight_update.proto."""

    tensor: int
    tensor_offset: int
    buffer_offset: int
    byte_count: int
    checksum: bytes | None
    changed_elements: int | None = None
    """Of a delta: it carries so many indexes and values. None: plain bytes."""


@dataclass(frozen=True, slots=True)
class _Account:
    """How far one tensor has come."""

    end: int = 0
    """The next record starts here; of changed elements: here or after it."""
    sparse: bool | None = None
    """Changed elements, or plain bytes. None: nothing came."""
    checksum: bytes | None = None
    """On the record that completed it."""

    @property
    def partial(self) -> bool:
        return self.sparse is not None and self.checksum is None


_NOTHING = _Account()


class Assembly:
    """The account of one attempt."""

    def __init__(self, layout: Layout, base: Sequence[bytes] | None = None) -> None:
        """`base`: of a delta; the checksums of the tensors that it changes, in layout order."""
        if base is not None and len(base) != len(layout.tensors):
            raise ValueError(f"a base of {len(base)} tensors under a layout of {len(layout.tensors)}")
        self.layout = layout
        self.chunk_count = 0
        self.byte_count = 0
        self._base = base
        self._accounts = [_NOTHING] * len(layout.tensors)
        self._complete = 0
        self._ended = False
        """Of a delta: its last chunk came."""

    def add(self, index: int, records: Sequence[Record], buffer_bytes: int, *, last: bool = False) -> list[int]:
        """Book one chunk. `last`: of a delta, nothing follows.

        Returns the tensors whose bytes are decided now, in the order of its records; after the last chunk of a delta
        also those that stay as they are in the base.

        Raises:
            FrameOutOfOrder: the chunk is not the next one, or a tensor's record is not.
            FrameInvalid: a record names no tensor, has a checksum too many or too few, or is none of such an update.
            ByteCountMismatch: a record passes the end of its tensor or of the buffer.
            ManifestIncomplete: nothing follows, and a tensor is partial.
        """
        if index != self.chunk_count or self._ended:
            expected = "commit" if self._ended else f"chunk {self.chunk_count}"
            raise FrameOutOfOrder(expected=expected, got=f"chunk {index}")
        if last and self._base is None:
            raise FrameInvalid("Chunk", "last", "belongs on deltas: of a whole update the layout tells the last")
        fresh: dict[int, _Account] = {}
        for record in records:  # all are judged before one is booked: a refusal leaves the account as it was
            fresh[record.tensor] = self._judge(record, fresh.get(record.tensor), buffer_bytes)
        if last:
            self._refuse_partial(fresh)
        return self._book(records, fresh) + (self._take_from_base() if last else [])

    def _book(self, records: Sequence[Record], fresh: dict[int, _Account]) -> list[int]:
        for tensor, account in fresh.items():
            self._accounts[tensor] = account
        completed = [r.tensor for r in records if r.checksum is not None]
        self._complete += len(completed)
        self.byte_count += sum(r.byte_count for r in records)
        self.chunk_count += 1
        return completed

    def _judge(self, record: Record, earlier: _Account | None, buffer_bytes: int) -> _Account:
        """The tensor's account with this record; `earlier`: after others of the chunk."""
        if record.tensor >= len(self._accounts):
            raise FrameInvalid("TensorRecord", "tensor", f"the layout has {len(self._accounts)} tensors")
        spec, sparse = self.layout.tensors[record.tensor], record.changed_elements is not None
        have = self._accounts[record.tensor] if earlier is None else earlier
        if have.checksum is not None or have.sparse not in (None, sparse):
            raise FrameOutOfOrder(expected="a tensor not yet complete", got=f"more of {spec.name}")
        end = self._end_of_elements(record, spec, have) if sparse else _end_of_bytes(record, spec, have)
        if record.buffer_offset + record.byte_count > buffer_bytes:
            raise ByteCountMismatch(
                what=f"buffer with {spec.name}", expected=record.buffer_offset + record.byte_count, got=buffer_bytes
            )
        if not sparse and (end == spec.byte_count) != (record.checksum is not None):
            raise FrameInvalid("TensorRecord", "checksum", f"belongs on the record that completes {spec.name}")
        return _Account(end, sparse, record.checksum)

    def _end_of_elements(self, record: Record, spec: TensorSpec, have: _Account) -> int:
        """Where the next record of the tensor may start: its indexes rise, so each takes an element's place at least.
        Whether they really do is seen by whoever reads them."""
        count, item = record.changed_elements or 0, spec.dtype.item_bytes
        if self._base is None:
            raise FrameInvalid("TensorRecord", "changed_elements", "belongs to deltas")
        if record.tensor_offset % item:
            raise FrameInvalid("TensorRecord", "tensor_offset", f"is inside an element of {spec.name}")
        if record.tensor_offset < have.end:
            raise FrameOutOfOrder(
                expected=f"{spec.name} from byte {have.end} on", got=f"{spec.name} from byte {record.tensor_offset}"
            )
        if record.byte_count != count * (INDEX_BYTES + item):
            raise ByteCountMismatch(
                what=f"{count} elements of {spec.name}", expected=count * (INDEX_BYTES + item), got=record.byte_count
            )
        end = record.tensor_offset + count * item
        if end > spec.byte_count:
            raise ByteCountMismatch(what=spec.name, expected=spec.byte_count, got=end)
        return end

    def _refuse_partial(self, fresh: dict[int, _Account]) -> None:
        accounts = [fresh.get(i, a) for i, a in enumerate(self._accounts)]
        partial = [t.name for t, a in zip(self.layout.tensors, accounts, strict=True) if a.partial]
        if partial:
            expected = sum(a.sparse is not None for a in accounts)
            raise ManifestIncomplete(names=partial, expected=expected, got=expected - len(partial))

    def _take_from_base(self) -> list[int]:
        """INV-5: what a delta does not mention is what its base has there."""
        assert self._base is not None, "only a delta has a last chunk"
        unchanged = [i for i, account in enumerate(self._accounts) if account.sparse is None]
        for tensor in unchanged:
            self._accounts[tensor] = _Account(checksum=self._base[tensor])
        self._complete += len(unchanged)
        self._ended = True
        return unchanged

    @property
    def complete(self) -> bool:
        """Every tensor of the layout is whole (INV-1: covered name by name)."""
        return self._complete == len(self._accounts) and (self._base is None or self._ended)

    def checksum(self, tensor: int) -> bytes:
        """The sender's checksum of a completed tensor."""
        value = self._accounts[tensor].checksum
        if value is None:
            raise LookupError(f"tensor {tensor} is not complete")
        return value

    def digest(self) -> bytes:
        """Content digest of what came; of a delta: of what it results in.

        Raises:
            ManifestIncomplete: tensors are missing or partial.
        """
        pairs = list(zip(self.layout.tensors, self._accounts, strict=True))
        missing = [t.name for t, a in pairs if a.checksum is None]
        if missing:
            raise ManifestIncomplete(names=missing, expected=len(pairs), got=self._complete)
        return content_digest([a.checksum for _, a in pairs if a.checksum is not None])


def _end_of_bytes(record: Record, spec: TensorSpec, have: _Account) -> int:
    """Bytes of the tensor that have come with this record."""
    if record.tensor_offset != have.end:
        raise FrameOutOfOrder(
            expected=f"{spec.name} from byte {have.end}", got=f"{spec.name} from byte {record.tensor_offset}"
        )
    end = have.end + record.byte_count
    if end > spec.byte_count:
        raise ByteCountMismatch(what=spec.name, expected=spec.byte_count, got=end)
    return end

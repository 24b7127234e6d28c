"""Chunk frames whose bytes are inline: put on the wire, and taken off it, past protobuf's objects.

On the wire they are UpdateWeightsRequest as protobuf has it, and nobody else has to know: `with_payload` writes the
message that protobuf would write, and `decoded` takes what any writer sends. Only the bytes themselves never go through
a protobuf object: setting such a field, serializing it, parsing it and reading it copy them once each.

Promises: what `decoded` does not see through at a glance is left to protobuf, whole; so nothing is accepted here that
protobuf refuses. No gRPC, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightplane.v1 import layout_pb2, weight_update_pb2

Request = weight_update_pb2.UpdateWeightsRequest

MIN_BYTES = 32 * 1024
"""Below it a glance costs more than the copies."""
MAX_FIELDS = 64
"""Of a chunk that are looked at before it is left to protobuf: version, index, records."""
_LENGTH_DELIMITED = 2


def _tag(descriptor: object, name: str) -> bytes:
    number: int = descriptor.fields_by_name[name].number  # type: ignore[attr-defined]
    return _varint(number << 3 | _LENGTH_DELIMITED)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_CHUNK = _tag(Request.DESCRIPTOR, "chunk")
_BUFFERS = _tag(weight_update_pb2.Chunk.DESCRIPTOR, "buffers")
_INLINE = _tag(layout_pb2.BufferHandle.DESCRIPTOR, "inline")


@dataclass(frozen=True, slots=True)
class BulkFrame:
    """A chunk frame as it came, and its bytes, which are not in it: its one buffer is inline and empty."""

    frame: Request
    payload: memoryview


def with_payload(head: weight_update_pb2.Chunk, pieces: Sequence[memoryview]) -> bytes:
    """A chunk frame as protobuf would serialize it; its one buffer has the pieces, one after the other. `head` has no
    buffer."""
    size = sum(map(len, pieces))
    inline = _INLINE + _varint(size)
    chunk = head.SerializeToString() + _BUFFERS + _varint(len(inline) + size) + inline
    return b"".join((_CHUNK, _varint(len(chunk) + size), chunk, *pieces))


def encoded(frame: Request | bytes) -> bytes:
    """A serializer, also of what is serialized already."""
    return frame if isinstance(frame, bytes) else frame.SerializeToString()


def decoded(data: bytes) -> Request | BulkFrame:
    """A deserializer. Raises DecodeError."""
    if len(data) >= MIN_BYTES and data.startswith(_CHUNK):
        place = _payload_at_the_end(data)
        if place is not None:
            return _without_payload(data, *place)
    return Request.FromString(data)


def _payload_at_the_end(data: bytes) -> tuple[int, int, int] | None:
    """Where the chunk's fields begin, where its one buffer does, and where the buffer's bytes do, up to the end of
    everything; None: it is not so, or not clearly."""
    length, begin = _read_varint(data, len(_CHUNK))
    at = begin
    if begin + length != len(data):
        return None
    for _ in range(MAX_FIELDS):
        if at >= len(data) or data[at] > 0x7F:
            return None
        if data.startswith(_BUFFERS, at):
            return _inline_alone(data, begin, at)
        after = _skipped(data, at)
        if after is None:
            return None
        at = after
    return None


def _inline_alone(data: bytes, begin: int, buffer: int) -> tuple[int, int, int] | None:
    length, inner = _read_varint(data, buffer + len(_BUFFERS))
    if inner + length != len(data) or not data.startswith(_INLINE, inner):
        return None
    size, payload = _read_varint(data, inner + len(_INLINE))
    return (begin, buffer, payload) if payload + size == len(data) else None


def _skipped(data: bytes, at: int) -> int | None:
    """Where the field after this one begins: of a number or of what has a length."""
    kind = data[at] & 7
    value, after = _read_varint(data, at + 1)
    if kind == 0:
        return after
    return after + value if kind == _LENGTH_DELIMITED else None


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends. What is no varint reads as one that fits nowhere."""
    value = shift = 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7
    return len(data) + 1, at


def _without_payload(data: bytes, begin: int, buffer: int, payload: int) -> BulkFrame:
    frame = Request()
    frame.chunk.MergeFromString(data[begin:buffer])
    frame.chunk.buffers.add(inline=b"")
    return BulkFrame(frame, memoryview(data)[payload:])

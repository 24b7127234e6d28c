"""Chunk frames that go past protobuf are the frames that protobuf would have written and read."""

from __future__ import annotations

import os

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.errors import FrameInvalid
from controlplane.rpc.bulk import MAX_FIELDS, MIN_BYTES, BulkFrame, decoded, encoded, with_payload
from controlplane.rpc.validation import validate
from weightplane.v1 import layout_pb2, version_pb2, weight_update_pb2

Request = weight_update_pb2.UpdateWeightsRequest
VERSION = version_pb2.WeightVersion(term=3, number=70_000)
BYTES = os.urandom(MIN_BYTES)


def head(records: int = 1, index: int = 5) -> weight_update_pb2.Chunk:
    chunk = weight_update_pb2.Chunk(version=VERSION, index=index)
    for tensor in range(records):
        chunk.records.add(tensor=tensor, tensor_offset=0, buffer_offset=0, byte_count=1 << 40, checksum=b"8 bytes!")
    return chunk


def whole(chunk: weight_update_pb2.Chunk, *buffers: layout_pb2.BufferHandle) -> Request:
    request = Request(chunk=chunk)
    request.chunk.buffers.extend(buffers)
    return request


def joined(frame: Request | BulkFrame) -> Request:
    """With its bytes in their place."""
    if not isinstance(frame, BulkFrame):
        return frame
    assert [b.inline for b in frame.frame.chunk.buffers] == [b""]
    made = Request()
    made.CopyFrom(frame.frame)
    made.chunk.buffers[0].inline = bytes(frame.payload)
    return made


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 100_000), max_size=4),
    records=st.integers(0, MAX_FIELDS + 5),
    index=st.sampled_from([0, 127, 128, 1 << 40]),
)
def test_what_is_written_is_what_protobuf_reads_and_what_is_read_is_what_was_written(
    sizes: list[int], records: int, index: int
) -> None:
    pieces = [memoryview(os.urandom(size)) for size in sizes]
    wire = with_payload(head(records, index), pieces)
    expected = whole(head(records, index), layout_pb2.BufferHandle(inline=b"".join(pieces)))
    assert Request.FromString(wire) == expected
    assert joined(decoded(wire)) == expected


def test_bytes_of_any_writer_stay_where_they_came() -> None:
    """As protobuf serializes them."""
    request = whole(head(), layout_pb2.BufferHandle(inline=BYTES))
    frame = decoded(encoded(request))
    assert isinstance(frame, BulkFrame)
    assert joined(frame) == request
    validate(frame.frame)


@pytest.mark.parametrize(
    "request_",
    [
        whole(head(), layout_pb2.BufferHandle(inline=b"few")),
        whole(head(), layout_pb2.BufferHandle(device_uuid="GPU-1", inline=BYTES)),
        whole(head(), layout_pb2.BufferHandle(inline=BYTES), layout_pb2.BufferHandle(inline=BYTES)),
        whole(
            weight_update_pb2.Chunk(version=VERSION, index=1, last=True),
            layout_pb2.BufferHandle(inline=BYTES),
        ),
        whole(head(MAX_FIELDS), layout_pb2.BufferHandle(inline=BYTES)),
        Request(open=weight_update_pb2.UpdateOpen(run_id="r" * MIN_BYTES)),
        Request(commit=weight_update_pb2.Commit(version=VERSION)),
    ],
    ids=["small", "of a device", "two buffers", "last behind it", "many records", "open", "commit"],
)
def test_a_frame_that_is_no_bulk_frame_is_protobufs_own(request_: Request) -> None:
    assert decoded(encoded(request_)) == request_


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_spoilt_frame_is_refused_or_read_as_protobuf_reads_it(data: st.DataObject) -> None:
    """Nothing is accepted that protobuf refuses."""
    wire = bytearray(with_payload(head(2), [memoryview(BYTES)]))
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, 79))] = data.draw(st.integers(0, 255))
    cut = bytes(wire[: data.draw(st.sampled_from([len(wire), len(wire) - 1, MIN_BYTES]))])
    try:
        expected = Request.FromString(cut)
    except DecodeError:
        with pytest.raises(DecodeError):
            decoded(cut)
        return
    assert joined(decoded(cut)) == expected


def test_a_bulk_frame_is_validated_like_any_other() -> None:
    frame = decoded(with_payload(weight_update_pb2.Chunk(index=0), [memoryview(BYTES)]))
    assert isinstance(frame, BulkFrame)
    with pytest.raises(FrameInvalid, match="version"):
        validate(frame.frame)

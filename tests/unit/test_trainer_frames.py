"""What a stream carries: handles as they are, or the same bytes in inline frames."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.errors import FrameOutOfOrder, SegmentUnreadable
from controlplane.core.layout import DType, Layout, TensorSpec
from controlplane.devices import host_id
from controlplane.rpc.validation import validate
from trainer_agent.agent.chunk_log import ChunkLog
from trainer_agent.agent.frames import INLINE_BYTES, Frame, SegmentReader, by_reference, inline
from trainer_agent.chunking import SegmentPlan, plan_segment
from trainer_agent.segments import Segment, create
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import layout_pb2, version_pb2, weight_update_pb2

SEGMENT_BYTES = 8 << 20


@pytest.fixture(scope="module")
def segment() -> Iterator[Segment]:
    made = create(f"weightplane-frames-{os.getpid()}-0123456789ab-r0-0", SEGMENT_BYTES)
    made.memory[:] = os.urandom(SEGMENT_BYTES)
    yield made
    made.unlink()


def announced(segment: Segment, plan: SegmentPlan) -> list[rank_pb2.SendChunk]:
    chunks = []
    for index, chunk in enumerate(plan.chunks):
        place = layout_pb2.SharedMemoryRange(
            segment=segment.name, host_id=host_id(), offset=chunk.start, byte_count=chunk.end - chunk.start
        )
        message = rank_pb2.SendChunk(index=index, buffers=[layout_pb2.BufferHandle(shared_memory=place)])
        for p in chunk.pieces:
            message.records.add(
                tensor=p.tensor,
                tensor_offset=p.tensor_offset,
                buffer_offset=p.segment_offset - chunk.start,
                byte_count=p.byte_count,
                checksum=b"checksum" if p.last else None,
            )
        chunks.append(message)
    return chunks


def as_protobuf_reads(frame: Frame, index: int = 0) -> weight_update_pb2.Chunk:
    """The chunk that arrives."""
    head = weight_update_pb2.Chunk(version=version_pb2.WeightVersion(term=1, number=1), index=index)
    made = frame.message(head)
    assert isinstance(made, bytes), "inline bytes go past protobuf"
    return weight_update_pb2.UpdateWeightsRequest.FromString(made).chunk


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.one_of(st.integers(0, 3000), st.integers(900_000, 2_300_000)), min_size=1, max_size=3))
def test_inline_frames_carry_every_byte_of_every_tensor_once(segment: Segment, sizes: list[int]) -> None:
    layout = Layout(tuple(TensorSpec(f"t{i}", DType.U8, (n,)) for i, n in enumerate(sizes)))
    plan = plan_segment(layout, 1_500_000)
    got = [bytearray() for _ in sizes]
    complete: list[int] = []
    reader = SegmentReader()
    for chunk in announced(segment, plan):
        for index, frame in enumerate(inline(chunk, reader)):
            message = as_protobuf_reads(frame, index)
            validate(message)
            data = message.buffers[0].inline
            assert len(data) == sum(r.byte_count for r in message.records) <= INLINE_BYTES
            for r in message.records:
                assert r.tensor_offset == len(got[r.tensor])
                got[r.tensor] += data[r.buffer_offset : r.buffer_offset + r.byte_count]
                complete += [r.tensor] if r.HasField("checksum") else []
    reader.close()
    assert complete == list(range(len(sizes)))
    for tensor, offset, size in zip(got, plan.offsets, sizes, strict=True):
        assert bytes(tensor) == bytes(segment.memory[offset : offset + size])


def test_an_empty_chunk_is_one_empty_frame() -> None:
    """G8."""
    place = layout_pb2.SharedMemoryRange(segment="weightplane-none", host_id=host_id(), offset=0, byte_count=0)
    chunk = rank_pb2.SendChunk(index=0, buffers=[layout_pb2.BufferHandle(shared_memory=place)])
    (message,) = [as_protobuf_reads(frame) for frame in inline(chunk, SegmentReader())]
    assert (list(message.records), message.buffers[0].inline) == ([], b"")
    assert list(by_reference(chunk)) == [Frame([], list(chunk.buffers))]


def test_a_range_outside_its_segment_or_a_segment_that_is_gone_is_unreadable(segment: Segment) -> None:
    reader = SegmentReader()
    beyond = layout_pb2.SharedMemoryRange(segment=segment.name, offset=SEGMENT_BYTES - 10, byte_count=100)
    with pytest.raises(SegmentUnreadable, match="not in it"):
        reader.read(beyond, 0, 50)
    gone = layout_pb2.SharedMemoryRange(segment="weightplane-gone", offset=0, byte_count=10)
    with pytest.raises(SegmentUnreadable, match="No such file"):
        reader.read(gone, 0, 5)
    outside = layout_pb2.SharedMemoryRange(segment="../../etc/passwd", offset=0, byte_count=10)
    with pytest.raises(SegmentUnreadable, match="no name of ours"):
        reader.read(outside, 0, 5)
    reader.close()


async def test_readers_of_a_log_get_each_chunk_from_the_first_on_and_then_the_end() -> None:
    chunks = ChunkLog()
    chunks.add(rank_pb2.SendChunk(index=0))
    late = asyncio.create_task(chunks.chunk(1))
    await asyncio.sleep(0)
    chunks.add(rank_pb2.SendChunk(index=1))
    assert (await late or rank_pb2.SendChunk(index=9)).index == 1
    end = asyncio.create_task(chunks.chunk(2))
    await asyncio.sleep(0)
    chunks.finish(rank_pb2.PushEnd(chunk_count=2))
    assert await end is None
    assert (await chunks.chunk(0) or rank_pb2.SendChunk(index=9)).index == 0


def test_a_log_refuses_gaps_repeats_and_a_wrong_count() -> None:
    chunks = ChunkLog()
    with pytest.raises(FrameOutOfOrder, match="chunk 0"):
        chunks.add(rank_pb2.SendChunk(index=1))
    chunks.add(rank_pb2.SendChunk(index=0))
    with pytest.raises(FrameOutOfOrder, match="the end after 1"):
        chunks.finish(rank_pb2.PushEnd(chunk_count=2))
    chunks.finish(rank_pb2.PushEnd(chunk_count=1))
    with pytest.raises(FrameOutOfOrder):
        chunks.add(rank_pb2.SendChunk(index=1))


def test_records_of_changed_elements_are_never_cut(segment: Segment) -> None:
    sizes = [400_000, 500_000, 300_000, 524_286]
    place = layout_pb2.SharedMemoryRange(
        segment=segment.name, host_id=host_id(), offset=64, byte_count=sum(sizes) + 1_000_000
    )
    chunk = rank_pb2.SendChunk(index=0, buffers=[layout_pb2.BufferHandle(shared_memory=place)])
    start = 0
    for tensor, size in enumerate(sizes):
        chunk.records.add(
            tensor=tensor, tensor_offset=0, buffer_offset=start, byte_count=size, changed_elements=size // 6
        )
        start += size
    chunk.records.add(tensor=9, tensor_offset=0, buffer_offset=start, byte_count=1_000_000)  # plain bytes fill up
    found = []
    for frame in inline(chunk, SegmentReader()):
        message = as_protobuf_reads(frame)
        data = message.buffers[0].inline
        assert len(data) <= INLINE_BYTES
        for r in message.records:
            found.append((r.tensor, r.byte_count, r.changed_elements))
            source = 64 + sum(sizes[: r.tensor]) if r.tensor < 9 else 64 + sum(sizes) + r.tensor_offset
            assert data[r.buffer_offset : r.buffer_offset + r.byte_count] == segment.memory[source:][: r.byte_count]
    assert found[:4] == [(t, size, size // 6) for t, size in enumerate(sizes)]
    assert sum(size for tensor, size, _ in found if tensor == 9) == 1_000_000

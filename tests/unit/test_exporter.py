"""The exporter and its plan: every tensor whole, contiguous, aligned and checked; a source that lies is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.errors import LayoutInvalid
from controlplane.core.layout import DType, Layout, TensorSpec, content_digest
from trainer_agent.chunking import ALIGNMENT_BYTES, MAX_RECORDS, TAIL_BYTES, plan_segment
from trainer_agent.rank.exporter import DTYPES, ExportedChunk, Exporter, layout_of
from trainer_agent.rank.memory import WholeMemory
from trainer_agent.source import ParamMeta

Named = tuple[str, torch.Tensor]


class Source:
    """Yields what it is given, states what it is told."""

    def __init__(self, tensors: Sequence[Named], stated: Sequence[Named] | None = None) -> None:
        self._tensors = tensors
        self._stated = tensors if stated is None else stated

    def metadata(self) -> Sequence[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self._stated]

    def ties(self) -> Sequence[tuple[str, str]]:
        return []

    def __iter__(self) -> Iterator[Named]:
        return iter(self._tensors)


def bytes_layout(sizes: Sequence[int]) -> Layout:
    return Layout(tuple(TensorSpec(f"t{i}", DType.U8, (n,)) for i, n in enumerate(sizes)))


def export(source: Source, chunk_bytes: int = 256) -> tuple[bytearray, list[ExportedChunk], Exporter]:
    layout = layout_of(source)
    plan = plan_segment(layout, chunk_bytes)
    memory = bytearray(max(plan.byte_count, 1))
    exporter = Exporter(layout, plan, WholeMemory(plan, memoryview(memory)))
    return memory, list(exporter.chunks(iter(source))), exporter


# ---- the plan ----


@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=40), limit=st.sampled_from([64, 100, 128, 256, 1024, 5000])
)
def test_chunks_tile_the_segment_and_their_pieces_cover_every_tensor_once_in_order(
    sizes: list[int], limit: int
) -> None:
    plan = plan_segment(bytes_layout(sizes), limit)
    ends = [0, *(c.end for c in plan.chunks)]
    assert [c.start for c in plan.chunks] == ends[:-1]
    assert ends[-1] == plan.byte_count
    assert all(0 <= c.end - c.start <= limit for c in plan.chunks)
    covered = [0] * len(sizes)
    for chunk in plan.chunks:
        for p in chunk.pieces:
            assert p.tensor_offset == covered[p.tensor]
            assert p.segment_offset == plan.offsets[p.tensor] + p.tensor_offset
            assert chunk.start <= p.segment_offset <= p.segment_offset + p.byte_count <= chunk.end
            covered[p.tensor] += p.byte_count
            assert p.last == (covered[p.tensor] == sizes[p.tensor])
    assert covered == sizes
    assert all(o % ALIGNMENT_BYTES == 0 for o in plan.offsets)


def test_the_last_chunk_is_a_small_one_and_no_chunk_is_smaller_without_need() -> None:
    sizes, limit = [28 * 2**20, *[2**20] * 100, 3], 32 * 2**20
    lengths = [c.end - c.start for c in plan_segment(bytes_layout(sizes), limit).chunks]
    assert lengths[0] == 32 * 2**20
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] <= TAIL_BYTES
    assert len(lengths) <= 8


@pytest.mark.parametrize("sizes", [[3 * 2**20] * 40, [120 * 2**20], [1, 100 * 2**20, 7, 19 * 2**20]])
def test_chunks_that_begin_small_are_at_most_as_large_as_all_before_them_and_tile_the_same_bytes(
    sizes: list[int],
) -> None:
    layout, first, largest = bytes_layout(sizes), 4 * 2**20, 32 * 2**20
    plan, whole = plan_segment(layout, largest, first), plan_segment(layout, largest)
    assert (plan.byte_count, plan.offsets) == (whole.byte_count, whole.offsets)
    assert [c.start for c in plan.chunks] == [0, *(c.end for c in plan.chunks[:-1])]
    assert plan.chunks[-1].end == plan.byte_count
    for chunk in plan.chunks:
        assert chunk.end - chunk.start <= min(largest, max(first, chunk.start))
    assert len(plan.chunks) <= len(whole.chunks) + 6


def test_a_first_chunk_may_be_as_small_as_the_alignment_and_no_smaller() -> None:
    for first in (1, 64, 100):
        assert plan_segment(bytes_layout([1000]), 512, first).chunks[0].end == ALIGNMENT_BYTES


def test_a_chunk_never_has_more_records_than_the_contract_allows() -> None:
    plan = plan_segment(bytes_layout([1] * (MAX_RECORDS + 1)), 1 << 30)
    assert [len(c.pieces) for c in plan.chunks] == [MAX_RECORDS, 1]


def test_chunks_below_the_alignment_and_layouts_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 64"):
        plan_segment(bytes_layout([1]), 63)
    with pytest.raises(ValueError, match="without tensors"):
        plan_segment(Layout(()), 64)


# ---- the bytes ----


def test_every_dtype_arrives_byte_for_byte_at_its_aligned_place() -> None:
    raw_bytes = (torch.arange(64) % 2).to(torch.uint8)  # any bytes for the rest; a bool is 0 or 1
    tensors = [(d.name, raw_bytes[: 8 * d.item_bytes].view(t)) for t, d in DTYPES.items()]
    memory, _, exporter = export(Source(tensors))
    plan = plan_segment(layout_of(Source(tensors)))
    for (_, tensor), offset in zip(tensors, plan.offsets, strict=True):
        raw = bytes(tensor.view(torch.uint8).numpy())
        assert bytes(memory[offset : offset + len(raw)]) == raw
    assert exporter.byte_count == sum(t.nbytes for _, t in tensors)


def test_strided_scalar_and_empty_tensors_are_written_as_their_logical_values() -> None:
    grid = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    memory, _, _ = export(Source([("t", grid.t()), ("s", torch.tensor(5, dtype=torch.int32)), ("e", grid[:0])]))
    assert bytes(memory[:48]) == bytes(grid.t().contiguous().numpy())
    assert memory[64] == 5


def test_a_split_tensor_lies_in_one_piece_and_its_checksum_rides_on_the_completing_record() -> None:
    tensor = torch.arange(1000, dtype=torch.uint8)
    memory, chunks, _ = export(Source([("a", tensor)]))
    records = [r for c in chunks for r in c.records]
    assert [r.tensor_offset for r in records] == [0, 256, 512, 768]
    assert [r.HasField("checksum") for r in records] == [False, False, False, True]
    assert records[-1].checksum == xxhash.xxh3_64_digest(bytes(memory[:1000]))
    assert bytes(memory[:1000]) == bytes(tensor.numpy())


def test_the_content_digest_is_that_of_the_tensors_checksums_in_order() -> None:
    tensors = [("a", torch.ones(3)), ("b", torch.zeros(300)), ("c", torch.empty(0))]
    _, _, exporter = export(Source(tensors))
    assert exporter.content_digest == content_digest([xxhash.xxh3_64_digest(t.numpy().tobytes()) for _, t in tensors])


def test_a_chunk_comes_out_as_soon_as_its_last_tensor_was_yielded() -> None:
    asked: list[str] = []
    tensors = [(f"t{i}", torch.zeros(64, dtype=torch.uint8)) for i in range(6)]

    def watched() -> Iterator[Named]:
        for name, tensor in tensors:
            asked.append(name)
            yield name, tensor

    layout = layout_of(Source(tensors))
    plan = plan_segment(layout, 128)
    chunks = Exporter(layout, plan, WholeMemory(plan, memoryview(bytearray(plan.byte_count)))).chunks(watched())
    next(chunks)
    assert asked == ["t0", "t1"]


def test_a_tensor_may_be_reused_by_the_source_after_the_next_is_asked_for() -> None:
    scratch = torch.zeros(64, dtype=torch.uint8)
    stated = [("a", scratch), ("b", scratch)]

    def reusing() -> Iterator[Named]:
        for value, name in enumerate("ab", start=1):
            scratch.fill_(value)
            yield name, scratch

    layout = layout_of(Source(stated))
    plan = plan_segment(layout)
    memory = bytearray(plan.byte_count)
    list(Exporter(layout, plan, WholeMemory(plan, memoryview(memory))).chunks(reusing()))
    assert (memory[0], memory[64]) == (1, 2)


# ---- what is refused ----

A, B = ("a", torch.zeros(4)), ("b", torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("yielded", "problem"),
    [
        ([A], "ended without tensors"),
        ([A, B, ("c", torch.zeros(1))], "more tensors"),
        ([A, A], "a tensor twice"),
        ([B, A], "leaves out a"),
        ([A, ("x", torch.zeros(2, 3))], "does not state"),
        ([A, ("b", torch.zeros(3, 2))], "shape"),
        ([A, ("b", torch.zeros(2, 3, dtype=torch.float16))], "float16"),
    ],
)
def test_an_iteration_that_differs_from_the_metadata_is_refused(yielded: list[Named], problem: str) -> None:
    with pytest.raises(LayoutInvalid, match=problem):
        export(Source(yielded, stated=[A, B]))


def test_the_deviating_tensor_is_never_written() -> None:
    source = Source([A, ("b", torch.ones(3, 2))], stated=[A, B])
    layout = layout_of(source)
    plan = plan_segment(layout)
    memory = bytearray(plan.byte_count)
    with pytest.raises(LayoutInvalid):
        list(Exporter(layout, plan, WholeMemory(plan, memoryview(memory))).chunks(iter(source)))
    assert not any(memory)


@pytest.mark.parametrize(
    ("stated", "problem"),
    [([], "no tensor"), ([A, A], "twice"), ([("z", torch.zeros(1, dtype=torch.complex64))], "cannot be sent")],
)
def test_metadata_that_cannot_be_a_layout_is_refused_before_anything_is_sent(stated: list[Named], problem: str) -> None:
    with pytest.raises(LayoutInvalid, match=problem):
        layout_of(Source(stated))


def test_records_are_frozen_with_their_chunk() -> None:
    _, chunks, _ = export(Source([A]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        chunks[0].index = 3  # type: ignore[misc]

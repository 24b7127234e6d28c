"""Deltas, written and applied: what results is bit for bit what a whole update brings."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.assembly import Assembly, Record
from controlplane.core.errors import ChecksumMismatch, FrameInvalid, UpdateAborted
from controlplane.core.layout import DType, Layout, TensorSpec, content_digest
from engine_agent.engine import StagedWeights
from engine_agent.receivers.delta import PatchedStaging, patch
from engine_agent.receivers.inline import InlineReceiver
from engine_agent.receivers.port import Buffer
from engine_agent.receivers.staging import Staging
from trainer_agent.rank import delta
from trainer_agent.rank.delta import DeltaChunk, DeltaWriter


@dataclass
class Memory:
    """A place in this process."""

    size: int
    name: str = "here"
    memory: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.memory = memoryview(bytearray(self.size))


def digests(weights: Sequence[bytes]) -> list[bytes]:
    return [xxhash.xxh3_64_digest(w) for w in weights]


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def write(layout: Layout, old: Sequence[bytes], new: Sequence[bytes], chunk_bytes: int) -> tuple[DeltaWriter, int]:
    """A finished writer, and how many places it took."""
    places: list[Memory] = []

    def place(size: int) -> Memory:
        places.append(Memory(size))
        return places[-1]

    writer = DeltaWriter(layout, chunk_bytes, place)
    for index, (before, after, checksum) in enumerate(zip(old, new, digests(new), strict=True)):
        writer.add(index, tensor(before), tensor(after), checksum)
    return writer, len(places)


def staged(layout: Layout, weights: Sequence[bytes]) -> InlineReceiver:
    receiver = InlineReceiver(Staging(layout))
    for index, data in enumerate(weights):
        receiver.place([Record(index, 0, 0, len(data), b"")], [Buffer("", inline=data)])
    return receiver


def patched(layout: Layout, base: StagedWeights) -> InlineReceiver:
    return InlineReceiver(PatchedStaging(layout, base))


def records(chunk: DeltaChunk) -> list[Record]:
    return [
        Record(
            r.tensor,
            r.tensor_offset,
            r.buffer_offset,
            r.byte_count,
            r.checksum if r.HasField("checksum") else None,
            r.changed_elements if r.HasField("changed_elements") else None,
        )
        for r in chunk.records
    ]


def receive(layout: Layout, old: Sequence[bytes], chunks: Sequence[DeltaChunk]) -> tuple[Assembly, InlineReceiver]:
    """As an engine agent does; every checksum is compared."""
    base = staged(layout, old)
    receiver, assembly = patched(layout, base.staged("1")), Assembly(layout, digests(old))
    base.close()
    for chunk in chunks:
        data = bytes(chunk.place.memory[: chunk.byte_count])
        completed = assembly.add(chunk.index, records(chunk), len(data))
        receiver.place(records(chunk), [Buffer("", inline=data)])
        for index in completed:
            receiver.check(index, assembly.checksum(index))
    for index in assembly.add(len(chunks), [], 0, last=True):
        receiver.place([], [Buffer("", inline=b"")])
        receiver.check(index, assembly.checksum(index))
    assert assembly.complete
    return assembly, receiver


def bytes_of(weights: StagedWeights) -> list[bytes]:
    result = []
    for place, spec in zip(weights.placements, weights.layout.tensors, strict=True):
        span = weights.chunks[""][place.chunk]
        with open(span.path, "rb") as file:
            file.seek(span.offset + place.offset)
            result.append(file.read(spec.byte_count))
    return result


@st.composite
def versions(draw: st.DrawFn) -> tuple[Layout, list[bytes], list[bytes]]:
    """A layout of any dtypes, scalars and empty tensors among them, and two versions of it: any bits at all."""
    shapes = st.sampled_from([(), (0,), (3, 0), (1,), (7,), (5, 9), (4, 4, 4), (130,)])
    specs, old, new = [], [], []
    for index in range(draw(st.integers(1, 5))):
        spec = TensorSpec(f"t{index}", draw(st.sampled_from(list(DType))), draw(shapes))
        before = draw(st.binary(min_size=spec.byte_count, max_size=spec.byte_count))
        after = bytearray(before)
        positions = st.integers(0, max(spec.byte_count - 1, 0))
        for at in draw(st.lists(positions, max_size=20)) if spec.byte_count else []:
            after[at] = draw(st.integers(0, 255))
        specs.append(spec)
        old.append(before)
        new.append(bytes(after))
    return Layout(tuple(specs)), old, new


@given(versions(), st.integers(16, 400))
@settings(deadline=None, max_examples=50)
def test_what_a_delta_results_in_is_the_new_version_bit_for_bit(
    case: tuple[Layout, list[bytes], list[bytes]], chunk_bytes: int
) -> None:
    layout, old, new = case
    writer, places = write(layout, old, new, chunk_bytes)
    chunks = writer.finish()
    assembly, receiver = receive(layout, old, chunks)
    assert bytes_of(receiver.staged("2")) == new
    assert assembly.digest() == content_digest(digests(new))
    assert assembly.byte_count == writer.byte_count == sum(r.byte_count for c in chunks for r in c.records)
    assert len(chunks) == places
    assert all(c.byte_count <= chunk_bytes for c in chunks)
    receiver.close()


def one(dtype: DType, *shape: int) -> Layout:
    return Layout((TensorSpec("t", dtype, shape),))


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (struct.pack("<3f", 0.0, 1.0, 2.0), struct.pack("<3f", -0.0, 1.0, 2.0), 1),
        (b"\x00\x00\xc0\x7f" * 3, b"\x00\x00\xc0\x7f" * 3, 0),
        (b"\x00\x00\xc0\x7f" * 3, b"\x00\x00\xc0\x7f\x01\x00\xc0\x7f\x00\x00\xc0\x7f", 1),
    ],
    ids=["minus zero is another zero", "a NaN that stays is no change", "another NaN is a change"],
)
def test_elements_are_compared_by_their_bits(before: bytes, after: bytes, count: int) -> None:
    writer, _ = write(one(DType.F32, 3), [before], [after], 64)
    assert writer.changed_elements == count


def test_a_tensor_goes_whole_where_that_is_smaller_and_not_at_all_where_nothing_changed() -> None:
    few, many = TensorSpec("few", DType.BF16, (100,)), TensorSpec("many", DType.BF16, (100,))
    layout = Layout((few, many, *one(DType.U8, 9).tensors))
    old = [bytes(200), bytes(200), bytes(9)]
    new = [b"\x01\x00" + bytes(198), b"\x01\x00" * 34 + bytes(132), bytes(9)]
    writer, _ = write(layout, old, new, 4096)
    (chunk,) = writer.finish()
    found = {r.tensor: r.changed_elements if r.HasField("changed_elements") else None for r in chunk.records}
    assert found == {0: 1, 1: None}
    assert writer.byte_count == 6 + 200


def test_a_delta_of_nothing_has_no_chunk_and_takes_no_memory() -> None:
    writer, places = write(one(DType.F32, 5), [bytes(20)], [bytes(20)], 64)
    assert (writer.finish(), places, writer.byte_count) == ([], 0, 0)


def test_a_delta_of_most_of_the_bytes_is_not_worth_it() -> None:
    half, all_of_it = os.urandom(512) + bytes(512), os.urandom(1024)
    layout = Layout((TensorSpec("a", DType.U8, (512,)), TensorSpec("b", DType.U8, (512,))))
    for new, worth in ((half, True), (all_of_it, False)):
        writer, _ = write(layout, [bytes(512)] * 2, [new[:512], new[512:]], 4096)
        assert writer.worth_it is worth


def test_indexes_count_from_their_record_and_a_record_reaches_no_further_than_int32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delta, "MAX_SPAN", 100)
    monkeypatch.setattr(delta, "BLOCK_ELEMENTS", 64)
    new = bytearray(1000)
    for at in (3, 102, 103, 500, 999):
        new[at] = 1
    layout = one(DType.U8, 1000)
    writer, _ = write(layout, [bytes(1000)], [bytes(new)], 4096)
    (chunk,) = writer.finish()
    assert [(r.tensor_offset, r.changed_elements) for r in chunk.records] == [(3, 2), (103, 1), (500, 1), (999, 1)]
    assert [r.HasField("checksum") for r in chunk.records] == [False, False, False, True]
    _, receiver = receive(layout, [bytes(1000)], [chunk])
    assert bytes_of(receiver.staged("2")) == [bytes(new)]
    receiver.close()


def test_a_record_of_changed_elements_fits_into_an_inline_frame() -> None:
    size = 800_000
    new = bytearray(size * 2)
    new[:: 2 * 4] = b"\x01" * (size // 4)
    writer, _ = write(one(DType.BF16, size), [bytes(size * 2)], [bytes(new)], 64 << 20)
    (chunk,) = writer.finish()
    assert max(r.byte_count for r in chunk.records) <= delta.RECORD_BYTES
    assert sum(r.changed_elements for r in chunk.records) == size // 4


# ---- what a receiver refuses ----


def sparse(indexes: Sequence[int], values: bytes) -> memoryview:
    return memoryview(struct.pack(f"<{len(indexes)}i", *indexes) + values)


@pytest.mark.parametrize("indexes", [(0, 0), (1, 0), (-1, 2), (0, 4)])
def test_indexes_that_do_not_rise_or_leave_the_tensor_are_refused_and_write_nothing(indexes: tuple[int, ...]) -> None:
    target = bytearray(8)
    with pytest.raises(FrameInvalid):
        patch(memoryview(target), sparse(indexes, b"\xff" * 4), 2, 2)
    assert target == bytes(8)


LAYOUT = Layout((TensorSpec("a", DType.F32, (8,)), TensorSpec("b", DType.BF16, (3,))))
OLD = [os.urandom(32), os.urandom(6)]


def test_inv5_a_base_whose_bytes_went_bad_is_found_also_in_what_the_delta_does_not_mention() -> None:
    spoilt = staged(LAYOUT, [OLD[0], bytes([OLD[1][0] ^ 1]) + OLD[1][1:]])
    receiver = patched(LAYOUT, spoilt.staged("1"))
    receiver.place([], [Buffer("", inline=b"")])
    receiver.check(0, digests(OLD)[0])
    with pytest.raises(ChecksumMismatch):
        receiver.check(1, digests(OLD)[1])
    receiver.close()
    spoilt.close()


def test_an_aborted_delta_leaves_its_base_as_it_was_and_gives_everything_back() -> None:
    base = staged(LAYOUT, OLD)
    before = len(os.listdir("/proc/self/fd"))
    receiver = patched(LAYOUT, base.staged("1"))
    data = sparse([0], b"\xff" * 4)
    receiver.place([Record(0, 0, 0, 8, b"x" * 8, 1)], [Buffer("", inline=bytes(data))])
    receiver.close()
    receiver.close()
    assert bytes_of(base.staged("1")) == OLD
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(UpdateAborted):
        receiver.place([], [Buffer("", inline=b"")])
    base.close()


def test_a_delta_that_is_ended_while_its_base_is_copied_says_so() -> None:
    base = staged(LAYOUT, OLD)
    receiver = patched(LAYOUT, base.staged("1"))
    base.close()
    receiver.close()
    with pytest.raises(UpdateAborted):
        receiver.place([], [Buffer("", inline=b"")])


def test_a_record_whose_indexes_are_refused_leaves_nothing_that_holds_the_memory() -> None:
    base = staged(LAYOUT, OLD)
    receiver = patched(LAYOUT, base.staged("1"))
    with pytest.raises(FrameInvalid) as refused:
        receiver.place([Record(0, 0, 0, 16, None, 2)], [Buffer("", inline=bytes(sparse([1, 0], b"\xff" * 8)))])
    receiver.close()
    base.close()
    assert refused.value.problem == "indexes must rise, and stay below 8"

"""The account of an update's bytes: nothing twice, nothing missing, nothing past an end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.assembly import Assembly, Record
from controlplane.core.errors import ByteCountMismatch, FrameInvalid, FrameOutOfOrder, ManifestIncomplete
from controlplane.core.layout import DType, Layout, TensorSpec, content_digest

SUM = b"checksum"
LAYOUT = Layout((TensorSpec("a", DType.U8, (10,)), TensorSpec("b", DType.U8, (0,)), TensorSpec("c", DType.U8, (4,))))


def whole(tensor: int, size: int) -> Record:
    return Record(tensor, 0, 0, size, SUM)


def test_tensors_complete_in_any_order_and_the_digest_is_in_layout_order() -> None:
    assembly = Assembly(LAYOUT)
    assert assembly.add(0, [whole(2, 4)], 4) == [2]
    assert assembly.add(1, [whole(1, 0), whole(0, 10)], 10) == [1, 0]
    assert assembly.complete
    assert assembly.digest() == content_digest([SUM] * 3)


def test_g8_an_empty_chunk_is_legal() -> None:
    assembly = Assembly(LAYOUT)
    assert assembly.add(0, [], 0) == []
    assert assembly.chunk_count == 1


@given(cuts=st.lists(st.integers(1, 9), unique=True).map(sorted))
def test_m5_a_tensor_split_anywhere_is_one_tensor(cuts: list[int]) -> None:
    assembly = Assembly(LAYOUT)
    edges = [0, *cuts, 10]
    completed = []
    for i, (start, end) in enumerate(itertools.pairwise(edges)):
        record = Record(0, start, 0, end - start, SUM if end == 10 else None)
        completed += assembly.add(i, [record], 10)
    assert completed == [0]


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (Record(9, 0, 0, 1, SUM), FrameInvalid),
        (Record(0, 3, 0, 7, SUM), FrameOutOfOrder),
        (Record(0, 0, 0, 11, SUM), ByteCountMismatch),
        (Record(0, 0, 95, 10, SUM), ByteCountMismatch),
        (Record(0, 0, 0, 10, None), FrameInvalid),
        (Record(0, 0, 0, 9, SUM), FrameInvalid),
    ],
)
def test_a_record_that_does_not_fit_is_refused(record: Record, error: type[Exception]) -> None:
    with pytest.raises(error):
        Assembly(LAYOUT).add(0, [record], 100)


def test_a_chunk_out_of_order_and_a_tensor_sent_twice_are_refused() -> None:
    assembly = Assembly(LAYOUT)
    with pytest.raises(FrameOutOfOrder):
        assembly.add(1, [], 0)
    assembly.add(0, [whole(2, 4)], 4)
    with pytest.raises(FrameOutOfOrder):
        assembly.add(1, [whole(2, 4)], 4)


def test_m2_a_digest_of_a_part_is_refused_with_the_missing_names() -> None:
    assembly = Assembly(LAYOUT)
    assembly.add(0, [whole(0, 10)], 10)
    with pytest.raises(ManifestIncomplete) as refusal:
        assembly.digest()
    assert refusal.value.names == ["b", "c"]


# ---- deltas ----

HALVES = Layout(
    (TensorSpec("x", DType.BF16, (10,)), TensorSpec("y", DType.F32, ()), TensorSpec("z", DType.BOOL, (0, 3)))
)
BASE = [b"base-x--", b"base-y--", b"base-z--"]


def changed(tensor: int, offset: int, count: int, item: int, checksum: bytes | None = SUM) -> Record:
    return Record(tensor, offset, 0, count * (4 + item), checksum, count)


def test_inv5_what_a_delta_does_not_mention_keeps_the_bases_checksum() -> None:
    assembly = Assembly(HALVES, BASE)
    assert assembly.add(0, [changed(0, 0, 3, 2)], 18) == [0]
    assert not assembly.complete
    assert assembly.add(1, [], 0, last=True) == [1, 2]
    assert assembly.complete
    assert assembly.digest() == content_digest([SUM, BASE[1], BASE[2]])
    assert (assembly.chunk_count, assembly.byte_count) == (2, 18)


def test_a_delta_of_every_tensor_ends_with_its_last_chunk_and_not_before() -> None:
    assembly = Assembly(HALVES, BASE)
    assembly.add(0, [changed(0, 0, 1, 2), whole(1, 4), whole(2, 0)], 20)
    assert not assembly.complete
    assembly.add(1, [], 0, last=True)
    assert assembly.complete
    with pytest.raises(FrameOutOfOrder):
        assembly.add(2, [], 0)


def test_a_delta_of_nothing_is_its_base() -> None:
    assembly = Assembly(HALVES, BASE)
    assert assembly.add(0, [], 0, last=True) == [0, 1, 2]
    assert assembly.digest() == content_digest(BASE)


def test_a_tensors_changed_elements_may_come_in_rising_records() -> None:
    assembly = Assembly(HALVES, BASE)
    assert assembly.add(0, [changed(0, 2, 2, 2, None), changed(0, 6, 1, 2, None)], 18) == []
    with pytest.raises(ManifestIncomplete) as partial:
        assembly.add(1, [], 0, last=True)
    assert partial.value.names == ["x"]
    assert assembly.add(1, [changed(0, 18, 1, 2)], 6) == [0]


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (changed(0, 0, 11, 2), ByteCountMismatch),
        (changed(0, 18, 2, 2), ByteCountMismatch),
        (Record(0, 0, 0, 13, SUM, 2), ByteCountMismatch),
        (changed(0, 1, 1, 2), FrameInvalid),
        (Record(0, 0, 90, 12, SUM, 2), ByteCountMismatch),
        (changed(2, 0, 1, 1), ByteCountMismatch),
        (changed(9, 0, 1, 1), FrameInvalid),
    ],
)
def test_changed_elements_that_do_not_fit_are_refused(record: Record, error: type[Exception]) -> None:
    with pytest.raises(error):
        Assembly(HALVES, BASE).add(0, [record], 100)


@pytest.mark.parametrize(
    "second", [changed(0, 4, 1, 2), Record(0, 6, 0, 14, SUM)], ids=["not rising", "plain after changed"]
)
def test_records_that_do_not_go_on_where_the_tensor_is_are_refused(second: Record) -> None:
    assembly = Assembly(HALVES, BASE)
    assembly.add(0, [changed(0, 0, 3, 2, None)], 18)
    with pytest.raises(FrameOutOfOrder):
        assembly.add(1, [second], 20)


def test_what_belongs_to_deltas_is_refused_in_a_whole_update() -> None:
    with pytest.raises(FrameInvalid):
        Assembly(HALVES).add(0, [changed(0, 0, 1, 2)], 6)
    with pytest.raises(FrameInvalid):
        Assembly(HALVES).add(0, [], 0, last=True)
    with pytest.raises(ValueError, match="a base of 1 tensors"):
        Assembly(HALVES, [SUM])

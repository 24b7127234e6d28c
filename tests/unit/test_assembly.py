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

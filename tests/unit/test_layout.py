"""Layouts: their digest names everything in them, and an engine refuses what it could not install whole."""

from __future__ import annotations

import dataclasses

import pytest

from controlplane.core.errors import (
    DtypeMismatch,
    FormatMismatch,
    LayoutInvalid,
    ManifestIncomplete,
    ShapeMismatch,
    UnknownTensor,
    WeightplaneError,
)
from controlplane.core.layout import DType, Expected, Layout, Target, TargetKind, TensorSpec, Tie, content_digest
from controlplane.rpc.channels import MAX_MESSAGE_BYTES
from controlplane.rpc.codec import layout_from_parts, layout_to_parts

A = TensorSpec("a", DType.BF16, (4, 2))
B = TensorSpec("b", DType.F32, (3,))
LAYOUT = Layout((A, B), (Tie("head", "a"),))
EXPECTED = Expected(
    shapes={"a": (4, 2), "b": (3,)},
    dtypes={"a": frozenset({DType.BF16}), "b": frozenset({DType.F32, DType.BF16})},
    optional=frozenset({"head"}),
)


@pytest.mark.parametrize(
    "other",
    [
        Layout((B, A), LAYOUT.ties),
        Layout((A, B)),
        Layout((dataclasses.replace(A, shape=(2, 4)), B), LAYOUT.ties),
        Layout((dataclasses.replace(A, dtype=DType.F16), B), LAYOUT.ties),
        Layout((A, B), LAYOUT.ties, format="fp8"),
        Layout((dataclasses.replace(A, targets=(Target(TargetKind.DRAFT),)), B), LAYOUT.ties),
    ],
)
def test_the_digest_names_order_ties_shapes_dtypes_format_and_targets(other: Layout) -> None:
    assert other.digest != LAYOUT.digest


@pytest.mark.parametrize(
    ("tensors", "ties"),
    [((A, A), ()), ((A,), (Tie("a", "a"),)), ((A,), (Tie("x", "y"),)), ((TensorSpec("n", DType.U8, (-1,)),), ())],
)
def test_a_layout_that_contradicts_itself_cannot_be_made(
    tensors: tuple[TensorSpec, ...], ties: tuple[Tie, ...]
) -> None:
    with pytest.raises(LayoutInvalid):
        Layout(tensors, ties)


def test_m1_a_tied_name_is_covered_by_its_sources_bytes() -> None:
    EXPECTED.check(LAYOUT)
    EXPECTED.check(Layout((A, B)))


@pytest.mark.parametrize(
    ("layout", "error"),
    [
        (Layout((A,)), ManifestIncomplete),
        (Layout((A, B, TensorSpec("c", DType.F32, (1,)))), UnknownTensor),
        (Layout((dataclasses.replace(A, shape=(8, 2)), B)), ShapeMismatch),
        (Layout((dataclasses.replace(A, dtype=DType.F32), B)), DtypeMismatch),
        (Layout((A, B), format="fp8"), FormatMismatch),
    ],
)
def test_m2_m6_m7_what_an_engine_could_not_install_whole_is_refused(
    layout: Layout, error: type[WeightplaneError]
) -> None:
    with pytest.raises(error):
        EXPECTED.check(layout)


def test_a_layout_of_140_000_tensors_goes_in_parts_below_the_message_limit() -> None:
    layout = Layout(
        tuple(
            TensorSpec(f"model.layers.{i // 700}.mlp.experts.{i % 700}.gate_up_proj.weight", DType.BF16, (7168, 2048))
            for i in range(140_000)
        )
    )
    parts = list(layout_to_parts(layout))
    assert max(p.ByteSize() for p in parts) < MAX_MESSAGE_BYTES / 4
    assert layout_from_parts(parts).digest == layout.digest


def test_the_content_digest_depends_on_every_checksum_and_on_their_order() -> None:
    one, two = b"1" * 8, b"2" * 8
    assert len({content_digest([one, two]), content_digest([two, one]), content_digest([one])}) == 3
    with pytest.raises(ValueError, match="8 bytes"):
        content_digest([b"short"])

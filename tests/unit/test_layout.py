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
from controlplane.core.layout import (
    DRAFT_ONLY,
    FP8_BLOCK,
    MODEL_ONLY,
    DType,
    Expected,
    Layout,
    Target,
    TargetKind,
    TensorSpec,
    Tie,
    content_digest,
)
from controlplane.rpc.channels import MAX_MESSAGE_BYTES
from controlplane.rpc.codec import layout_from_parts, layout_to_parts

A = TensorSpec("a", DType.BF16, (4, 2))
B = TensorSpec("b", DType.F32, (3,))
BOTH = (Target(TargetKind.MODEL), Target(TargetKind.DRAFT))
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
        Layout((dataclasses.replace(A, targets=BOTH), B), LAYOUT.ties),
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


@pytest.mark.parametrize(
    ("name", "targets"),
    [("w", DRAFT_ONLY), ("draft:w", MODEL_ONLY), ("draft:w", BOTH)],
)
def test_a_name_and_its_targets_say_the_same(name: str, targets: tuple[Target, ...]) -> None:
    with pytest.raises(LayoutInvalid, match="draft's alone"):
        Layout((TensorSpec(name, DType.F32, (1,), targets),))


SHARED = TensorSpec("embed", DType.F32, (4, 2), BOTH)
OWN = TensorSpec("draft:a", DType.F32, (7,), DRAFT_ONLY)
WITH_DRAFT = Layout((A, B, SHARED, OWN), (Tie("head", "a"), Tie("draft:head", "embed")))
DRAFTED = dataclasses.replace(
    EXPECTED,
    shapes={**EXPECTED.shapes, "embed": (4, 2)},
    draft=Expected(shapes={"embed": (4, 2), "a": (7,)}, dtypes={}, optional=frozenset({"head"})),
)


def test_a_layout_is_parted_by_its_targets_each_under_its_own_names() -> None:
    assert [t.name for t in WITH_DRAFT.model.tensors] == ["a", "b", "embed"]
    assert WITH_DRAFT.model.ties == (Tie("head", "a"),)
    assert WITH_DRAFT.draft is not None
    assert [(t.name, t.shape) for t in WITH_DRAFT.draft.tensors] == [("embed", (4, 2)), ("a", (7,))]
    assert WITH_DRAFT.draft.ties == (Tie("head", "embed"),)
    assert LAYOUT.draft is None
    assert LAYOUT.model is LAYOUT


def test_a_tie_to_what_the_other_target_alone_has_is_refused() -> None:
    with pytest.raises(LayoutInvalid, match="source"):
        DRAFTED.check(Layout((A, B, SHARED, OWN), (Tie("draft:head", "b"),)))


def test_a_draft_is_covered_whole_or_left_as_it_is() -> None:
    DRAFTED.check(WITH_DRAFT)
    DRAFTED.check(Layout((A, B, dataclasses.replace(SHARED, targets=MODEL_ONLY)), LAYOUT.ties))
    with pytest.raises(ManifestIncomplete, match="draft:a"):
        DRAFTED.check(Layout((A, B, SHARED)))
    with pytest.raises(ShapeMismatch):
        DRAFTED.check(Layout((A, B, SHARED, dataclasses.replace(OWN, shape=(8,)))))


def test_what_is_for_a_target_that_the_engine_lacks_is_refused() -> None:
    with pytest.raises(UnknownTensor, match="draft:embed"):
        dataclasses.replace(DRAFTED, draft=None).check(WITH_DRAFT)
    adapter = (Target(TargetKind.ADAPTER, "tone"),)
    with pytest.raises(UnknownTensor, match="adapter"):
        EXPECTED.check(Layout((A, B, TensorSpec("c", DType.F32, (1,), adapter))))


def test_8_bit_floats_in_blocks_stand_with_their_scales() -> None:
    weight = TensorSpec("q.weight", DType.F8_E4M3, (256, 128))
    scale = TensorSpec("q.weight_scale_inv", DType.F32, (2, 1))
    Layout((weight, scale, A), format=FP8_BLOCK)
    with pytest.raises(LayoutInvalid, match="without a scale"):
        Layout((weight, A), format=FP8_BLOCK)


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

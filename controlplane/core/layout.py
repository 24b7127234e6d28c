"""Layouts: which tensors a model's weights are, in which order, and what an engine expects of them.

A layout is sent once per engine incarnation and then named by its digest; chunks name tensors by
index. The content digest names the *bytes* of one version under a layout. Both are pure functions
of what they describe, so a full update and a delta to the same weights have the same digest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from controlplane.core.errors import (
    DtypeMismatch,
    FormatMismatch,
    LayoutInvalid,
    ManifestIncomplete,
    ShapeMismatch,
    UnknownTensor,
)

CHECKSUM_BYTES = 8
"""XXH3_64, canonical (big-endian) form."""
PLAIN = "plain"
"""Format of weights that are numbers as they stand."""
TAKES_FORMAT = "format:"
"""How an engine's capability begins that names the format which it takes."""
FP8_BLOCK = "fp8-block"
"""8-bit floats with one scale for each block of them; a weight's scales stand beside it, under its name and
SCALE_SUFFIX, as checkpoints of such models have them."""
SCALE_SUFFIX = "_scale_inv"
DRAFT_PREFIX = "draft:"
"""Before the name of a tensor that is the draft model's alone: both may have different tensors of one name."""


class DType(Enum):
    """Element types, by their safetensors names; the value is the size of an element in bits."""

    F64 = ("F64", 64)
    F32 = ("F32", 32)
    F16 = ("F16", 16)
    BF16 = ("BF16", 16)
    F8_E4M3 = ("F8_E4M3", 8)
    F8_E5M2 = ("F8_E5M2", 8)
    F8_E8M0 = ("F8_E8M0", 8)
    I64 = ("I64", 64)
    I32 = ("I32", 32)
    I16 = ("I16", 16)
    I8 = ("I8", 8)
    U8 = ("U8", 8)
    BOOL = ("BOOL", 8)

    @property
    def item_bytes(self) -> int:
        return self.value[1] // 8


class TargetKind(Enum):
    """Which set of an engine's weights a tensor goes to."""

    MODEL = "model"
    DRAFT = "draft"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, order=True)
class Target:
    kind: TargetKind = TargetKind.MODEL
    adapter: str = ""
    """Name of the adapter; empty for the others."""

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.adapter}" if self.adapter else self.kind.value


MODEL_ONLY = (Target(),)
"""What a tensor belongs to unless it says otherwise."""
DRAFT_ONLY = (Target(TargetKind.DRAFT),)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as the engine's checkpoint names it, with DRAFT_PREFIX if it is the draft's alone. `shape` counts
    elements."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    targets: tuple[Target, ...] = MODEL_ONLY

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * self.dtype.item_bytes

    def is_for(self, kind: TargetKind) -> bool:
        return any(target.kind is kind for target in self.targets)


@dataclass(frozen=True, slots=True)
class Tie:
    """`alias` has no bytes of its own: it is the tensor `source` under a second name. An alias with DRAFT_PREFIX is the
    draft's, any other the model's."""

    alias: str
    source: str


@dataclass(frozen=True)
class Layout:
    """Names, dtypes, shapes, ties, format, targets and order of a model's tensors.

    Raises:
        LayoutInvalid: a name stands twice, a tie has no source, a dimension is negative, a name's prefix says another
            target than the tensor does, or an 8-bit float of FP8_BLOCK has no scale.
    """

    tensors: tuple[TensorSpec, ...]
    ties: tuple[Tie, ...] = ()
    format: str = PLAIN

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors] + [t.alias for t in self.ties]
        twice = _repeated(names)
        if twice:
            raise LayoutInvalid("a name stands twice in the layout", names=twice)
        known = {t.name for t in self.tensors}
        loose = [t.alias for t in self.ties if t.source not in known]
        if loose:
            raise LayoutInvalid("a tie names a source that is not in the layout", names=loose)
        negative = [t.name for t in self.tensors if any(d < 0 for d in t.shape)]
        if negative:
            raise LayoutInvalid("a dimension is negative", names=negative)
        misnamed = [t.name for t in self.tensors if t.name.startswith(DRAFT_PREFIX) != (t.targets == DRAFT_ONLY)]
        if misnamed:
            raise LayoutInvalid(f"{DRAFT_PREFIX} stands before what is the draft's alone", names=misnamed)
        unscaled = [] if self.format != FP8_BLOCK else [n for n in self._scaled if n + SCALE_SUFFIX not in known]
        if unscaled:
            raise LayoutInvalid(f"8-bit floats of {FP8_BLOCK} without a scale", names=unscaled)

    @property
    def _scaled(self) -> list[str]:
        return [t.name for t in self.tensors if t.dtype in (DType.F8_E4M3, DType.F8_E5M2)]

    @cached_property
    def model(self) -> Layout:
        """What of it is for the model itself."""
        if all(t.targets == MODEL_ONLY for t in self.tensors):
            return self
        return self._part(TargetKind.MODEL, [t for t in self.ties if not t.alias.startswith(DRAFT_PREFIX)])

    @cached_property
    def draft(self) -> Layout | None:
        """What of it is for the draft model, under the draft's own names. None: it leaves the draft as it is."""
        if not any(t.is_for(TargetKind.DRAFT) for t in self.tensors):
            return None
        return self._part(TargetKind.DRAFT, [t for t in self.ties if t.alias.startswith(DRAFT_PREFIX)])

    def _part(self, kind: TargetKind, ties: list[Tie]) -> Layout:
        """LayoutInvalid: a tie's source is for the other target."""
        return Layout(
            tuple(replace(t, name=own_name(t.name), targets=MODEL_ONLY) for t in self.tensors if t.is_for(kind)),
            tuple(Tie(own_name(t.alias), own_name(t.source)) for t in ties),
            self.format,
        )

    @cached_property
    def digest(self) -> bytes:
        """sha256 over every field in order; 32 bytes."""
        h = hashlib.sha256(b"weightplane-layout-v1\0")
        h.update(self.format.encode() + b"\0")
        for t in self.tensors:
            targets = ",".join(map(str, t.targets))
            h.update(f"{t.name}\0{t.dtype.value[0]}\0{t.shape}\0{targets}\n".encode())
        for tie in self.ties:
            h.update(f"{tie.alias}\0={tie.source}\n".encode())
        return h.digest()

    @cached_property
    def byte_count(self) -> int:
        return sum(t.byte_count for t in self.tensors)


def content_digest(checksums: Sequence[bytes]) -> bytes:
    """sha256 over the tensors' XXH3_64 checksums in layout order; 32 bytes. Names one version's bytes."""
    h = hashlib.sha256(b"weightplane-content-v1\0")
    for c in checksums:
        if len(c) != CHECKSUM_BYTES:
            raise ValueError(f"a checksum has {CHECKSUM_BYTES} bytes, got {len(c)}")
        h.update(c)
    return h.digest()


@dataclass(frozen=True)
class Expected:
    """What an engine's checkpoint says its weights are: the shape and dtypes accepted for each name."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, frozenset[DType]]
    optional: frozenset[str] = field(default_factory=frozenset)
    """Names that the engine knows but can do without, such as a tied `lm_head.weight`."""
    format: str = PLAIN
    draft: Expected | None = None
    """Of its draft model, under the draft's own names; None if it has none."""

    def check(self, layout: Layout) -> None:
        """Refuse a layout that this engine could not install whole (INV-1, INV-4: before anything is touched).

        A draft is covered whole or left as it is: what it proposes the model judges, so an old one costs speed only.

        Raises:
            FormatMismatch, UnknownTensor, ManifestIncomplete, ShapeMismatch, DtypeMismatch.
        """
        adapters = [f"{t.name} of an adapter" for t in layout.tensors if t.is_for(TargetKind.ADAPTER)]
        if adapters:
            raise UnknownTensor(names=adapters)
        self._check(layout.model)
        if layout.draft is not None:
            if self.draft is None:
                raise UnknownTensor(names=[DRAFT_PREFIX + t.name for t in layout.draft.tensors])
            self.draft._check(layout.draft, DRAFT_PREFIX)

    def _check(self, layout: Layout, prefix: str = "") -> None:
        if layout.format != self.format:
            raise FormatMismatch(expected=self.format, got=layout.format)
        covered = {t.name for t in layout.tensors} | {t.alias for t in layout.ties}
        unknown = sorted(covered - self.shapes.keys() - self.optional)
        if unknown:
            raise UnknownTensor(names=[prefix + name for name in unknown])
        missing = sorted(self.shapes.keys() - covered - self.optional)
        if missing:
            raise ManifestIncomplete(names=[prefix + n for n in missing], expected=len(self.shapes), got=len(covered))
        for t in layout.tensors:
            want = self.shapes.get(t.name)
            if want is not None and want != t.shape:
                raise ShapeMismatch(name=prefix + t.name, expected=want, got=t.shape)
            accepted = self.dtypes.get(t.name)
            if accepted is not None and t.dtype not in accepted:
                raise DtypeMismatch(
                    name=prefix + t.name, expected="|".join(sorted(d.value[0] for d in accepted)), got=t.dtype.value[0]
                )


def own_name(name: str) -> str:
    """A tensor's name in its own checkpoint."""
    return name.removeprefix(DRAFT_PREFIX)


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    twice: list[str] = []
    for n in names:
        if n in seen:
            twice.append(n)
        seen.add(n)
    return twice

"""A layout that an engine could not install whole."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.errors.tree import Refused


@dataclass(eq=False)
class LayoutInvalid(Refused):
    reason = "LAYOUT_INVALID"
    template = "{problem}: {names}"
    problem: str
    names: list[str]


@dataclass(eq=False)
class LayoutUnknown(Refused):
    reason = "LAYOUT_UNKNOWN"
    template = "no layout with digest {digest} was sent to this engine incarnation"
    digest: str


@dataclass(eq=False)
class ManifestIncomplete(Refused):
    reason = "MANIFEST_INCOMPLETE"
    template = "the layout covers {got} of the engine's {expected} tensors; missing: {names}"
    names: list[str]
    expected: int
    got: int


@dataclass(eq=False)
class UnknownTensor(Refused):
    reason = "UNKNOWN_TENSOR"
    template = "the engine's model has no tensor of these names: {names}"
    names: list[str]


@dataclass(eq=False)
class ShapeMismatch(Refused):
    reason = "SHAPE_MISMATCH"
    template = "{name}: the engine expects shape {expected}, got {got}"
    name: str
    expected: tuple[int, ...]
    got: tuple[int, ...]


@dataclass(eq=False)
class DtypeMismatch(Refused):
    reason = "DTYPE_MISMATCH"
    template = "{name}: the engine accepts {expected}, got {got}"
    name: str
    expected: str
    got: str


@dataclass(eq=False)
class FormatMismatch(Refused):
    reason = "FORMAT_MISMATCH"
    template = "the engine's weights are in format {expected}, the layout is in {got}"
    expected: str
    got: str

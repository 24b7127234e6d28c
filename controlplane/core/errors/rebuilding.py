"""From a class to its reason, and back from what was told on the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from controlplane.core.errors.tree import PUBLIC, WeightplaneError


def error_classes(root: type[WeightplaneError] = WeightplaneError) -> Sequence[type[WeightplaneError]]:
    """Every concrete class of the tree (those with a reason), for the table and its test."""
    found: list[type[WeightplaneError]] = []
    for cls in root.__subclasses__():
        found.extend([cls] if cls.reason else [])
        found.extend(error_classes(cls))
    return found


def rebuild(reason: str, metadata: Mapping[str, str]) -> WeightplaneError | None:
    """The error that `metadata()` described, attributes and all; None if the tree has no such reason."""
    of_the_tree = (c for c in error_classes() if c.__module__ == PUBLIC)
    cls = next((c for c in of_the_tree if c.reason == reason), None)
    if cls is None:
        return None
    return cls(**{f.name: _parsed(str(f.type), metadata.get(f.name, "")) for f in dataclasses.fields(cls)})


def _parsed(kind: str, text: str) -> object:
    if kind == "int":
        return int(text or "0")
    if kind == "float":
        return float(text or "0")
    if kind == "bool":
        return text == "True"
    if kind.startswith("list"):
        return [t for t in text.split(", ") if t]
    if kind.startswith("tuple"):
        return tuple(int(t) for t in text.strip("()").split(",") if t.strip())
    return text

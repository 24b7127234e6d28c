"""Which version made which tokens of a sample (INV-11): as engine agents draw it, and as clients check it.

Spans cover tokens from the first one on, in order and without a gap. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.versions import WeightVersion

VERSION_CHANGED = "version_changed"
"""How a sample ends that wanted one version only."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens start ≤ i < end of a sample were made by `version`."""

    version: WeightVersion
    start: int
    end: int


def extend(spans: list[Span], version: WeightVersion, count: int) -> None:
    """So many tokens more, by this version: the same version goes on in the same span."""
    start = spans[-1].end if spans else 0
    if spans and spans[-1].version == version:
        spans[-1] = Span(version, spans[-1].start, start + count)
    else:
        spans.append(Span(version, start, start + count))

"""Which version made which tokens of a sample (INV-11): as engine agents draw it, and as clients check it.

Spans cover tokens from the first one on, in order and without a gap. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.versions import WeightVersion

VERSION_CHANGED = "version_changed"
"""How a sample ends that wanted one version only."""
ABORTED = "aborted"
"""Stop reason of an abort by name: its caller's."""
PAUSED = "paused"
"""Of an abort by a pause, an operator's or a trainer's."""
UPDATING = "updating"
"""Of an abort by an update whose pause policy says so."""
POISONED = "poisoned"
"""Of an abort because the weights became a mixture."""


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


def is_cut(finish_reason: str, stop_reason: str) -> bool:
    """Whether an engine ended a sample for its own sake: an abort that its caller did not ask for. Agents say why in
    the words above; vLLM has `error`, a server behind an agent none."""
    return finish_reason == "abort" and stop_reason != ABORTED

"""How far a version is behind its fleet, in fleet commits.

Numbers are burned by updates that failed, so their difference says nothing; what counts is how often the fleet came to
serve something newer. A version that was never committed counts as the commit before it. Never negative.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.core.versions import WeightVersion

MAX_COMMITS = 64
"""Remembered; what is older lags by more than all of them."""

LAG_BINS = 9
"""Tokens are counted by lags of 0 to 7 fleet commits, and more."""


@dataclass(frozen=True, slots=True)
class FleetCommit:
    """A version that the fleet came to serve, as its model's commit number `ordinal`."""

    version: WeightVersion
    ordinal: int


@dataclass(slots=True)
class Commits:
    """A model's latest commits, in order. Grows by `note` only."""

    latest: list[FleetCommit] = field(default_factory=list)

    @property
    def ordinal(self) -> int:
        """Of the newest commit; 0 before the first."""
        return self.latest[-1].ordinal if self.latest else 0

    def note(self, commits: Iterable[FleetCommit]) -> None:
        """Learn of commits, in any order, known ones too."""
        known = {c.version.number: c for c in (*self.latest, *commits)}
        self.latest = [known[number] for number in sorted(known)][-MAX_COMMITS:]

    def lag(self, version: WeightVersion) -> int:
        """Fleet commits between `version` and the newest one; at least so many where it is older than all known."""
        return self.ordinal - self._ordinal_of(version)

    def _ordinal_of(self, version: WeightVersion) -> int:
        place = bisect_right(self.latest, version.number, key=lambda c: c.version.number)
        if place:
            return self.latest[place - 1].ordinal
        return self.latest[0].ordinal - 1 if self.latest else 0

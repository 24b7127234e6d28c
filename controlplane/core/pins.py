"""Pins: which versions may begin a sample. Compared with what an engine holds, never assigned to it (INV-2)."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.lag import Commits
from controlplane.core.versions import WeightVersion


@dataclass(frozen=True, slots=True)
class Pin:
    """What a caller wants of the version that begins its sample. All that is given must hold."""

    min_version: WeightVersion | None = None
    """This one or a later one, by number."""
    exact_version: WeightVersion | None = None
    """This one, for the whole sample: an install ends it."""
    max_lag: int | None = None
    """At most so many fleet commits behind the newest one that the judge has heard of."""

    def allows(self, applied: WeightVersion, commits: Commits) -> bool:
        return self.allows_by_number(applied) and (self.max_lag is None or commits.lag(applied) <= self.max_lag)

    def allows_by_number(self, version: WeightVersion) -> bool:
        """As far as can be told without knowing what the fleet committed."""
        return (self.min_version is None or version.number >= self.min_version.number) and (
            self.exact_version is None or version == self.exact_version
        )

    @property
    def wants(self) -> bool:
        """Anything at all."""
        return self != ANY

    def __str__(self) -> str:
        parts = [
            f"{self.min_version} or later" if self.min_version is not None else "",
            f"exactly {self.exact_version}" if self.exact_version is not None else "",
            f"a lag of at most {self.max_lag}" if self.max_lag is not None else "",
        ]
        return " and ".join(p for p in parts if p) or "any"


ANY = Pin()

"""When an engine that died is started again: after a growing wait, and not for ever.

Pure. What counts is how often it died in a row: an engine that lived well for a while begins anew, so that a run of
weeks does not end with its sixth unrelated death.
"""

from __future__ import annotations

HEALTHY_SECONDS = 600.0
"""A life of at least this length, counted from its readiness, was well."""


class Restarts:
    """The deaths of one agent's engines."""

    def __init__(self, limit: int, waits: tuple[float, float], healthy_seconds: float = HEALTHY_SECONDS) -> None:
        """`limit`: restarts in a row. `waits`: the first and the longest wait in seconds, doubled in between."""
        self._limit = limit
        self._first, self._longest = waits
        self._healthy_seconds = healthy_seconds
        self.in_a_row = 0
        """Deaths since the last life that was well."""

    def died(self, lived_seconds: float) -> float | None:
        """Seconds to wait before the next life; None: it died too often. `lived_seconds`: from ready to its death."""
        if lived_seconds >= self._healthy_seconds:
            self.in_a_row = 0
        self.in_a_row += 1
        if self.in_a_row > self._limit:
            return None
        return float(min(self._first * 2 ** min(self.in_a_row - 1, 30), self._longest))

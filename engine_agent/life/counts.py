"""How many requests one life has, inside and outside of its gate, and how far behind the versions of their tokens were.

Each change is an event; it rides along with the next report, for a report for each request would be too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from controlplane.core.engine_core import EngineCore
from controlplane.core.engine_events import Event, RequestsCounted
from controlplane.core.lag import LAG_BINS
from controlplane.core.versions import WeightVersion
from controlplane.rpc.metrics import TOKEN_LAG


class RequestCounts:
    """Of one life."""

    def __init__(self, core: EngineCore, apply: Callable[[Event], object]) -> None:
        self.waiting = 0
        """Requests outside the gate."""
        self.places: int | None = None
        """How many requests the engine runs at once; None before it started."""
        self._live = 0
        self._tokens_by_lag = [0] * LAG_BINS
        """Tokens made so far, by how many fleet commits their version was behind then."""
        self._core = core
        self._apply = apply

    def entered(self, live: int) -> None:
        """So many are in the engine now. Those that it has no place for wait too."""
        self._live = live
        self._changed()

    def made(self, version: WeightVersion, count: int) -> None:
        """Tokens, by this version."""
        lag = self._core.commits.lag(version)
        self._tokens_by_lag[min(lag, LAG_BINS - 1)] += count
        TOKEN_LAG.count(self._core.state.model, lag, count)

    @contextmanager
    def waiting_outside(self) -> Iterator[None]:
        """One request more waits outside the gate while the block runs."""
        self.waiting += 1
        self._changed()
        try:
            yield
        finally:
            self.waiting -= 1
            self._changed()

    def _changed(self) -> None:
        without_place = 0 if self.places is None else max(0, self._live - self.places)
        waiting = self.waiting + without_place
        self._apply(RequestsCounted(self._live, waiting, tuple(self._tokens_by_lag)))

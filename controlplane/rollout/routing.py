"""Which engine to ask. What the coordinator says is routable, and what this client has in flight; no I/O.

Promises only engines that meet the pin, with their load counted by this client's own requests: what engines report is
older than what it just sent. Which one of them is a policy's to say. Routes of a coordinator that went away stay in
force, marked stale (INV-10: a lost coordinator shuts no gate).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from controlplane.core.lag import Commits, FleetCommit
from controlplane.core.pins import Pin
from controlplane.core.versions import EngineId, Incarnation, RunId, WeightVersion


@dataclass(frozen=True, slots=True)
class Route:
    """An engine that may be asked."""

    engine_id: EngineId
    incarnation: Incarnation
    endpoint: str
    applied: WeightVersion | None
    """What it last said that it holds."""
    live_requests: int
    """Requests in it, from every client, as it last said."""
    max_requests: int = 0
    """How many it runs at once; 0: unknown."""
    kept: bool = False
    """It stays at that version while the fleet moves on: only a request that asks for just that one goes there."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a model, as the coordinator last said."""

    run_id: RunId
    revision: int
    routes: tuple[Route, ...]
    served: tuple[WeightVersion, ...]
    commits: tuple[FleetCommit, ...] = ()
    """The latest, oldest first."""
    stale: bool = False
    """The coordinator is away: engines may have moved on since."""


Life = tuple[EngineId, Incarnation]


@dataclass(slots=True)
class RoutingTable:
    """Routes and load. Not thread-safe: one event loop owns it."""

    routes: Routes | None = None
    commits: Commits = field(default_factory=Commits)
    """Of the fleet, as far as this client was told."""
    usual: int = 0
    """How many engines there are when none is missing, as far as was seen."""
    _in_flight: Counter[EngineId] = field(default_factory=Counter)
    _reported: dict[EngineId, int] = field(default_factory=dict)
    """By engine: how many of its requests were this client's when it was heard of last."""
    _asked: dict[EngineId, int] = field(default_factory=dict)
    _clock: int = 0

    def replace(self, routes: Routes) -> None:
        self.routes = routes
        self._reported = {r.engine_id: self._in_flight[r.engine_id] for r in routes.routes}
        self.commits.note(routes.commits)
        self.usual = max(self.usual, sum(not r.kept for r in routes.routes))

    def mark_stale(self) -> None:
        if self.routes is not None:
            self.routes = replace(self.routes, stale=True)

    def candidates(self, pin: Pin, tried: Collection[Life] = ()) -> list[Route]:
        """Engines not yet tried that meet the pin.

        Stale routes are not judged by the pin: the engine itself does that, and knows better.
        """
        if self.routes is None:
            return []
        judged = pin.wants and not self.routes.stale
        return [
            r
            for r in self.routes.routes
            if (r.engine_id, r.incarnation) not in tried
            and (not r.kept or pin.exact_version == r.applied)
            and (not judged or self._meets(r, pin))
        ]

    @contextmanager
    def asking(self, route: Route) -> Iterator[None]:
        """Counts a request as in flight on `route`'s engine while the block runs."""
        self._clock += 1
        self._asked[route.engine_id] = self._clock
        self._in_flight[route.engine_id] += 1
        try:
            yield
        finally:
            self._in_flight[route.engine_id] -= 1

    def newest_applied(self) -> WeightVersion | None:
        """The highest version on any route, for error texts."""
        applied = [r.applied for r in self.routes.routes if r.applied is not None] if self.routes else []
        return max(applied, default=None)

    def _meets(self, route: Route, pin: Pin) -> bool:
        return route.applied is not None and pin.allows(route.applied, self.commits)

    def has_room(self, route: Route) -> bool:
        """The engine would run one request more: by its size, this client's requests, and what others were seen to
        have in it."""
        others = max(0, route.live_requests - self._reported.get(route.engine_id, 0))
        return not route.max_requests or self._in_flight[route.engine_id] + others < route.max_requests

    def load(self, route: Route) -> tuple[int, int, int]:
        """Own requests first; then what others send there; then whoever was asked longest ago."""
        return (self._in_flight[route.engine_id], route.live_requests, self._asked.get(route.engine_id, 0))

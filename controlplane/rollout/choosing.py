"""The wait for an engine that may be asked, within a request's patience."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from controlplane.core import errors as e
from controlplane.core.pins import Pin
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId
from controlplane.rollout.board import RouteBoard
from controlplane.rollout.policies import Policy
from controlplane.rollout.routing import Route

RETRY_PAUSE_SECONDS = 0.25
"""Between two rounds over all engines, unless the routes change earlier."""
SETTLE_SECONDS = 0.1
"""How long a request waits for an engine that is usually there, while others could serve it."""
SHORTEST_WAIT_SECONDS = 0.05


@dataclass(slots=True, kw_only=True)
class Search:
    """One request's search for an engine: what it may be, and the time that there is."""

    model: ModelName
    pin: Pin
    session_id: str
    started: float
    deadline: float
    """Monotonic: when the caller gives up, tokens or not."""
    patience: float
    """Until when an engine, its gate and the pin are waited for."""
    tried: set[tuple[EngineId, Incarnation]] = field(default_factory=set)
    last_error: e.WeightplaneError | None = None
    settle_by: float = 0.0
    """Until when missing engines are waited for; 0: not yet."""
    aborted: bool = False
    """Its caller ended it: it comes back as it is, without a token too."""

    @property
    def engine_wait(self) -> float:
        """Seconds: half of the patience left, so that another engine can still be tried after this one."""
        return max((self.patience - time.monotonic()) / 2, SHORTEST_WAIT_SECONDS)

    @property
    def time_left(self) -> float:
        """Seconds, for one more call."""
        return max(self.deadline - time.monotonic(), SHORTEST_WAIT_SECONDS)


class Choosing:
    """Chooses among routable engines that meet the pin and have room."""

    def __init__(self, board: RouteBoard, policy: Policy, coordinator: str) -> None:
        """`coordinator`: whose routes these are, for error texts."""
        self._board = board
        self._policy = policy
        self._coordinator = coordinator

    async def next_route(self, search: Search) -> tuple[Route, RunId] | None:
        """None: its caller ended it.

        Raises what the coordinator refused, the last engine's answer, VersionUnavailable, DeadlineExceeded.
        """
        table = self._board.table
        while not search.aborted:
            if self._board.refused is not None:
                raise self._board.refused
            candidates = table.candidates(search.pin, search.tried)
            left = search.patience - time.monotonic()
            if candidates and table.routes is not None and (left > 0 or search.last_error is None):
                if await self._settles(search, candidates):
                    continue
                free = [route for route in candidates if table.has_room(route)]
                if free:
                    return self._policy.choose(free, table, search.session_id), table.routes.run_id
                await self._room(search)
                continue
            if left <= 0:
                raise self._gave_up(search)
            await self._board.change(min(left, RETRY_PAUSE_SECONDS) if search.tried else left)
            search.tried.clear()
        return None

    async def _room(self, search: Search) -> None:
        """Every engine that may be asked is full: their requests' ends are waited for, as a sample's would be."""
        left = search.deadline - time.monotonic()
        if left <= 0:
            waited = round(time.monotonic() - search.started, 1)
            raise e.DeadlineExceeded(phase="route", waited_for="room in an engine", waited_seconds=waited)
        await self._board.room(left)

    async def _settles(self, search: Search, candidates: list[Route]) -> bool:
        """Whether the routes changed while a request waited, once, for engines that are usually there.

        After an update the engines come back one after the other; without this a burst of requests would all go to
        the first.
        """
        table = self._board.table
        if search.tried or len(candidates) >= table.usual:
            return False
        now = time.monotonic()
        search.settle_by = search.settle_by or now + SETTLE_SECONDS
        if await self._board.change(max(search.settle_by - now, 0)):
            return True
        table.usual = len(candidates)  # they are gone for longer: nobody waits for them again
        return False

    def _gave_up(self, search: Search) -> e.WeightplaneError:
        if search.last_error is not None:
            return search.last_error
        applied = self._board.table.newest_applied()
        if search.pin.wants and applied is not None:
            return e.VersionUnavailable(wanted=str(search.pin), applied=str(applied))
        waited = round(time.monotonic() - search.started, 1)
        target = f"a routable engine of model {search.model} from the coordinator at {self._coordinator}"
        if self._board.lost:
            target += f" ({self._board.lost})"
        return e.DeadlineExceeded(phase="route", waited_for=target, waited_seconds=waited)

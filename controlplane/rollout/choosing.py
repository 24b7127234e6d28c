"""The wait for an engine that may be asked, within a request's patience."""

from __future__ import annotations

import time

from controlplane.core import errors as e
from controlplane.core.versions import RunId
from controlplane.rollout.asking import Ask
from controlplane.rollout.policies import Policy
from controlplane.rollout.routing import Route
from controlplane.rollout.watching import RouteWatch

RETRY_PAUSE_SECONDS = 0.25
"""Between two rounds over all engines, unless the routes change earlier."""
SETTLE_SECONDS = 0.1
"""How long a request waits for an engine that is usually there, while others could serve it."""


class Choosing:
    """Chooses among routable engines that meet the pin and have room."""

    def __init__(self, watch: RouteWatch, policy: Policy, coordinator: str) -> None:
        self._watch = watch
        self._policy = policy
        self._coordinator = coordinator

    async def next_route(self, ask: Ask) -> tuple[Route, RunId]:
        """Raises what the coordinator refused, the last engine's answer, VersionUnavailable, DeadlineExceeded."""
        table = self._watch.table
        while True:
            if self._watch.refused is not None:
                raise self._watch.refused
            candidates = table.candidates(ask.pin, ask.tried)
            left = ask.patience - time.monotonic()
            if candidates and table.routes is not None and (left > 0 or ask.last_error is None):
                if await self._settles(ask, candidates):
                    continue
                free = [route for route in candidates if table.has_room(route)]
                if free:
                    return self._policy.choose(free, table, ask.session_id), table.routes.run_id
                await self._room(ask)
                continue
            if left <= 0:
                raise self._gave_up(ask)
            await self._watch.change(min(left, RETRY_PAUSE_SECONDS) if ask.tried else left)
            ask.tried.clear()

    async def _room(self, ask: Ask) -> None:
        """Every engine that may be asked is full: their requests' ends are waited for, as a sample's would be."""
        left = ask.deadline - time.monotonic()
        if left <= 0:
            waited = round(time.monotonic() - ask.started, 1)
            raise e.DeadlineExceeded(phase="route", waited_for="room in an engine", waited_seconds=waited)
        await self._watch.room(left)

    async def _settles(self, ask: Ask, candidates: list[Route]) -> bool:
        """Whether the routes changed while a request waited, once, for engines that are usually there.

        After an update the engines come back one after the other; without this a burst of requests would all go to
        the first.
        """
        table = self._watch.table
        if ask.tried or len(candidates) >= table.usual:
            return False
        now = time.monotonic()
        ask.settle_by = ask.settle_by or now + SETTLE_SECONDS
        if await self._watch.change(max(ask.settle_by - now, 0)):
            return True
        table.usual = len(candidates)  # they are gone for longer: nobody waits for them again
        return False

    def _gave_up(self, ask: Ask) -> e.WeightplaneError:
        if ask.last_error is not None:
            return ask.last_error
        applied = self._watch.table.newest_applied()
        if ask.pin.wants and applied is not None:
            return e.VersionUnavailable(wanted=str(ask.pin), applied=str(applied))
        waited = round(time.monotonic() - ask.started, 1)
        target = f"a routable engine of model {ask.model} from the coordinator at {self._coordinator}"
        if self._watch.lost:
            target += f" ({self._watch.lost})"
        return e.DeadlineExceeded(phase="route", waited_for=target, waited_seconds=waited)

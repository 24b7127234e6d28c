"""How a life's installs ended, for each writer that asks, whenever it asks."""

from __future__ import annotations

import asyncio

from controlplane.core.errors import WeightplaneError
from controlplane.core.versions import UpdateId
from engine_agent.life.installing import Applied

MAX_OUTCOMES = 16
"""Ended updates whose canary and counts are kept for a writer that comes back."""


class Outcomes:
    """Of one life. INV-6: an earlier install of the same update says nothing about a later one."""

    def __init__(self) -> None:
        self._waited_for: dict[UpdateId, asyncio.Future[WeightplaneError | None]] = {}
        self._applied: dict[UpdateId, Applied] = {}
        self._failures: dict[UpdateId, WeightplaneError] = {}

    def begin(self, update_id: UpdateId) -> None:
        """An install of it begins."""
        self._applied.pop(update_id, None)
        self._failures.pop(update_id, None)
        self._future(update_id)

    async def of(self, update_id: UpdateId) -> Applied:
        """Wait for its end. Raises its error."""
        done = self._applied.get(update_id)
        if done is not None:
            return done
        if update_id in self._failures:  # it ended between the attachment and this question
            raise self._failures[update_id]
        error = await asyncio.shield(self._future(update_id))
        if error is not None:
            raise error
        return self._applied[update_id]

    def _future(self, update_id: UpdateId) -> asyncio.Future[WeightplaneError | None]:
        return self._waited_for.setdefault(update_id, asyncio.get_running_loop().create_future())

    def note(self, update_id: UpdateId, found: Applied) -> None:
        """It applied; who waits is told by `decide`."""
        self._applied[update_id] = found

    def decide(self, update_id: UpdateId, error: WeightplaneError | None) -> None:
        """It ended: None is applied."""
        future = self._waited_for.pop(update_id, None)
        if future is not None and not future.done():
            future.set_result(error)
        if error is not None:
            self._failures[update_id] = error
        for old in list(self._applied)[:-MAX_OUTCOMES]:
            del self._applied[old]
        for old in list(self._failures)[:-MAX_OUTCOMES]:
            del self._failures[old]

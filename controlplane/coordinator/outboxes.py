"""What goes to the sessions: to each its welcome, then states, then perhaps an error that ends it.

States are level-triggered: an agent that reads slowly misses some, and what it reads is the newest. Nothing is decided
here; the hub says when.
"""

from __future__ import annotations

import asyncio

from controlplane.coordinator import views
from controlplane.core.errors import WeightplaneError
from controlplane.core.fleet import FleetCore
from controlplane.core.versions import Term
from controlplane.rpc.codec import seconds_to_proto
from weightplane.v1 import fleet_pb2

MAX_PENDING_FRAMES = 256
"""Frames waiting for one agent; an agent that reads none for so long is cut off and comes again."""


class Outbox:
    """Of one session."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[fleet_pb2.SessionResponse | WeightplaneError] = asyncio.Queue(MAX_PENDING_FRAMES)
        self.welcomed = False
        """Its hello was answered: from then on it is told the fleet's states."""

    def put(self, item: fleet_pb2.SessionResponse | WeightplaneError) -> None:
        if self._frames.full():
            self._frames.get_nowait()  # the oldest is the one nobody needs
        self._frames.put_nowait(item)

    async def get(self) -> fleet_pb2.SessionResponse:
        """The next frame. Raises the error that ends the session."""
        item = await self._frames.get()
        if isinstance(item, WeightplaneError):
            raise item
        return item


class Outboxes:
    """Of all sessions, by number."""

    def __init__(self, core: FleetCore, heartbeat_seconds: float) -> None:
        self._core = core
        self._heartbeat_seconds = heartbeat_seconds
        self._of: dict[int, Outbox] = {}
        self._last = 0

    def open(self) -> tuple[int, Outbox]:
        self._last += 1
        outbox = self._of[self._last] = Outbox()
        return self._last, outbox

    def drop(self, session: int) -> None:
        self._of.pop(session, None)

    def greet(self, session: int, term: Term) -> None:
        """The first frame of a session; states come after it, never before."""
        outbox = self._of.get(session)
        if outbox is not None:
            outbox.put(fleet_pb2.SessionResponse(welcome=self._welcome(session, term)))
            outbox.welcomed = True

    def end(self, session: int, error: WeightplaneError) -> None:
        if session in self._of:
            self._of[session].put(error)

    def broadcast(self) -> None:
        """One state for all, but for members of units, which may serve less."""
        common = fleet_pb2.SessionResponse(fleet_state=views.fleet_state(self._core))
        for session, outbox in self._of.items():
            if not outbox.welcomed:
                continue
            own = self._core.serves_its_own(session)
            state = fleet_pb2.SessionResponse(fleet_state=views.fleet_state(self._core, session)) if own else common
            outbox.put(state)

    def _welcome(self, session: int, trainer_term: Term) -> fleet_pb2.Welcome:
        return fleet_pb2.Welcome(
            coordinator_term=self._core.term,
            heartbeat_interval=seconds_to_proto(self._heartbeat_seconds),
            lease_ttl=seconds_to_proto(self._core.settings.lease_ttl_seconds),
            trainer_term=trainer_term,
            state=views.fleet_state(self._core, session),
        )

"""Whether an engine makes progress: a round trip through its core, again and again (INV-10).

Promises that a round trip which waits behind an install, a sleep or a wake counts as none that failed: those have
deadlines of their own. An engine whose core does not answer though nothing holds it up is *stalled*: alive as far as
any process table says, and not to be routed to. It is stalled no longer when it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine_agent.engine import Engine

PROBE_SECONDS = 1.0
"""Between two round trips through the engine: one that dies while nobody asks it anything is noticed in this time."""
STALL_SECONDS = 15.0
"""Without an answer. A core answers between two steps, and no step of a healthy engine is so long."""


class Progress:
    """Of one engine. `watch` runs beside it."""

    def __init__(self, engine: Engine, busy: Callable[[], bool], stalled: Callable[[bool], None]) -> None:
        """`busy`: something with a deadline of its own holds the core up. `stalled` is told each change."""
        self.looks = 0
        """Grows while the watch itself goes on, whatever the engine does: the agent's loop lives."""
        self._engine = engine
        self._busy = busy
        self._tell = stalled
        self._stalled = False

    async def watch(self) -> None:
        """Until the engine is gone. Raises EngineDied, DeadlineExceeded."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            self.looks += 1
            await self._round_trip()

    async def _round_trip(self) -> None:
        trip = asyncio.ensure_future(self._engine.probe())
        waited = 0.0
        try:
            while not (await asyncio.wait({trip}, timeout=PROBE_SECONDS))[0]:
                self.looks += 1
                waited = 0.0 if self._busy() else waited + PROBE_SECONDS
                if waited >= STALL_SECONDS:
                    self._say(True)
            trip.result()
            self._say(False)
        finally:
            trip.cancel()

    def _say(self, stalled: bool) -> None:
        if stalled is not self._stalled:
            self._stalled = stalled
            self._tell(stalled)

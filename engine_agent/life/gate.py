"""The gate of one life, as its engine's scheduler follows it: level-triggered, and by no command.

Promises that the scheduler runs exactly while tokens may leave, or while only what lets requests finish shuts the gate;
and that it is started and stopped by one task at a time, under the life's lock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from controlplane.core.engine_state import LETS_FINISH, Life, Poisoned
from controlplane.core.errors import EngineDied
from controlplane.core.versions import WeightVersion
from engine_agent.life.life_parts import LifeParts


class Gate:
    """`keep` runs beside its life."""

    def __init__(self, life: LifeParts) -> None:
        self.runs = True
        """The scheduler does: requests that are in the engine go on."""
        self._life = life

    async def keep(self) -> None:
        """Level-triggered: the scheduler runs exactly while `_may_step`."""
        try:
            async for _ in self._life.state.watch():
                async with self._life.lock:
                    await self._follow()
        except EngineDied as error:
            self._life.tasks.die(str(error))

    async def _follow(self, *, ran: bool = False) -> None:
        """`ran`: the scheduler ran until this agent itself stopped it, for a moment."""
        state = self._life.core.state
        if isinstance(state.weights, Poisoned):
            self._life.requests.abort_all()
            if state.frozen:
                cause = f"poisoned ({state.weights.cause}), and no update heals a frozen model's engine"
                raise EngineDied(engine_id=state.engine_id, cause=cause)
        steps = self._may_step(ran=ran or self.runs)
        if steps and not self.runs and state.applied is not None:
            await self._start_scheduler(state.applied)
        elif not steps and self.runs and state.life is Life.RUNNING and not state.installing:
            await self.stand_still()  # an install does it itself: if that fails the old version serves on (INV-4)

    def _may_step(self, *, ran: bool) -> bool:
        """The gate is open, or only what lets requests finish shuts it: nobody enters, and who is in goes on to the
        end; also under a version that the fleet serves no more, for a draining engine gets no other."""
        state, served = self._life.core.state, self._life.core.served
        others = frozenset(h for h in state.holds if h.kind not in LETS_FINISH)
        if others != state.holds and ran and state.applied is not None:
            served |= {state.applied}
        return replace(state, holds=others).gate_open(served)

    @asynccontextmanager
    async def standing_still(self) -> AsyncIterator[None]:
        """No forward pass runs, and no install. Raises EngineDied, DeadlineExceeded.

        Afterwards, also where the engine did not stand still in time, the gate decides again: it opens by what the
        engine holds and who holds it, and by nothing else (INV-4).
        """
        async with self._life.lock:
            ran = self.runs
            try:
                await self.stand_still()
                yield
            finally:
                await self._follow(ran=ran)

    async def _start_scheduler(self, version: WeightVersion) -> None:
        self._life.requests.release(version)
        await self._life.engine.resume()
        self.runs = True
        self._life.state.set(self._life.core.state)  # wakes those who wait to enter

    async def stand_still(self) -> None:
        """No forward pass runs when this returns, whatever state a failed install left the scheduler in."""
        if not self.runs:
            await self._life.engine.quiesce()
            return
        self.runs = False  # nobody enters any more
        self._life.requests.draw_border(await self._life.engine.quiesce())

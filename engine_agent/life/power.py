"""Whether one life's engine has its devices: sleep and wake, one at a time.

Each is decided when the one before is done, so what the core believes of the devices is what they are. Once begun it
goes to its end, whoever waits; an engine that neither sleeps nor wakes is in an unknown state, and its life ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core import engine_sleep
from controlplane.core.errors import EngineDied, WeightplaneError
from controlplane.rpc.tasks import to_the_end
from engine_agent.life.gate import Gate
from engine_agent.life.lent import LentDevices
from engine_agent.life.life_parts import LifeParts


class Power:
    """Of one life."""

    def __init__(self, life: LifeParts, gate: Gate, lent: LentDevices, prove: Callable[[], Awaitable[None]]) -> None:
        """`prove` makes up for the canary of what was installed without a KV cache."""
        self._life = life
        self._gate = gate
        self._lent = lent
        self._prove = prove
        self._one_at_a_time = asyncio.Lock()

    async def sleep(self, event: events.SleepRequested) -> None:
        """Free the devices; returns when they are free. From here on what it takes away is not claimed (INV-1).

        Raises the core's refusals, EngineDied; LedgerError, with nothing changed.
        """
        self._life.core.heed(event)
        async with self._one_at_a_time:
            if self._lent.sleeps_for(event.owner):
                return
            self._lent.expect(event.owner)
            try:
                effects = self._life.apply(event)
            except WeightplaneError:
                self._lent.note()
                raise
            if any(isinstance(effect, fx.StartSleep) for effect in effects):
                await to_the_end(self._or_die(self._sleep(event.level)))

    async def wake(self, event: events.WakeRequested) -> None:
        """Take the devices again; returns when that is done. Raises the core's refusals, EngineDied."""
        self._life.core.heed(event)
        if event.kv:
            self._lent.given_back([event.owner])
        async with self._one_at_a_time:
            if any(isinstance(effect, fx.StartWake) for effect in self._life.apply(event)):
                await to_the_end(self._or_die(self._wake(event.kv)))

    async def _sleep(self, level: int) -> None:
        async with self._life.lock:
            await self._gate.stand_still()
            await self._life.engine.sleep(level)

    async def _wake(self, kv: bool) -> None:
        async with self._life.lock:
            await self._life.engine.wake(kv_cache=kv)
            self._life.apply(events.Woke(kv))
            if engine_sleep.owes_canary(self._life.core.state):
                await self._prove()

    async def _or_die(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            cause = f"sleep or wake did not end: {error!r}"
            self._life.tasks.die(cause)
            raise EngineDied(engine_id=self._life.core.state.engine_id, cause=cause) from error

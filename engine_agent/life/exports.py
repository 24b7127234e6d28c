"""Device memory of ranks that one life's workers have open.

Opened when an update's open frame names it, kept for later updates that name the same, closed when one names other or
none, when a later term is heard of (G7), and with the life. What was closed is never opened again: a late frame of a
rank that is gone must not have a worker read what the driver has put there since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from controlplane.core.errors import IpcNotPossible, WeightplaneError
from controlplane.device_memory.ranges import ExportedProbe
from engine_agent.engine import Engine

log = structlog.get_logger(__name__)

OPEN_SECONDS = 30.0
"""For all workers to open an export and read 1 MiB of it; a worker in mid-step is waited for."""
MAX_CLOSED = 1024
"""Ids of exports that were closed, kept so that none of them is opened again."""


class EngineExports:
    """Of one life."""

    def __init__(self, engine: Engine, engine_id: str) -> None:
        self._engine = engine
        self._engine_id = engine_id
        self._open: frozenset[str] = frozenset()
        self._closed: list[str] = []
        self._term = 0
        """Of the writer whose exports are open."""
        self._lock = asyncio.Lock()

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    async def take(self, probes: Sequence[ExportedProbe], term: int = 0) -> None:
        """Have just these open. Raises IpcNotPossible, EngineDied."""
        named = frozenset(p.range.export_id for p in probes)
        async with self._lock:
            if named == self._open:
                self._term = term
                return
            gone = next((p.range for p in probes if p.range.export_id in self._closed), None)
            if gone is not None:
                raise self._refused(gone.device_uuid, "this export was closed before")
            self._closed = [*self._closed, *(self._open - named)][-MAX_CLOSED:]
            self._open, self._term = named, term
            await self._ask(probes)

    def heard(self, term: int) -> bool:
        """Whether what is open is an earlier writer's than this one (G7)."""
        return self.any_open and self._term < term

    async def close(self) -> None:
        """Have none open. What the engine says to that is logged: nobody waits for it."""
        try:
            await self.take(())
        except WeightplaneError as error:
            log.warning("exports_not_closed", engine_id=self._engine_id, reason=error.reason, cause=str(error))

    async def _ask(self, probes: Sequence[ExportedProbe]) -> None:
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await self._engine.open_exports(probes)
        except TimeoutError as error:
            self._give_up()
            first = probes[0].range.device_uuid if probes else ""
            raise self._refused(first, f"not every worker answered within {OPEN_SECONDS} s") from error
        except (WeightplaneError, asyncio.CancelledError):
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Some worker may have opened them, and could not say so: they are not asked for again."""
        self._closed, self._open = [*self._closed, *self._open][-MAX_CLOSED:], frozenset()

    def _refused(self, device_uuid: str, cause: str) -> IpcNotPossible:
        return IpcNotPossible(engine_id=self._engine_id, device_uuid=device_uuid, cause=cause)

"""The door while its agent runs: its server, the app of the present life, and what a router is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

from controlplane.rpc.security import HttpGuard
from engine_agent.life.engine_life import EngineLife, EngineLifeHolder
from engine_agent.openai_door.answers import App
from engine_agent.openai_door.door import UNASKED, Door
from engine_agent.openai_door.router import RouterRegistration
from engine_agent.openai_door.server import DoorServer
from engine_agent.openai_door.settings import OpenAiSettings

log = structlog.get_logger(__name__)


class RunningDoor:
    """Its port is bound from the start; between lives it says 503."""

    def __init__(
        self,
        holder: EngineLifeHolder,
        settings: OpenAiSettings,
        build: Callable[[EngineLife], Awaitable[App]],
        guard: HttpGuard = UNASKED,
    ) -> None:
        """Raises PortUnavailable."""
        self._settings = settings
        self._door = Door(holder, settings, build, guard)
        self._server = DoorServer(self._door, settings.listen, guard.context())
        self.url = settings.advertise or f"{guard.scheme}://{self._server.address}"

    @asynccontextmanager
    async def open_for(self, life: EngineLife) -> AsyncIterator[None]:
        """While the block runs the life's engine is behind the door. Raises EngineDied."""
        await self._door.open(life)
        log.info("door_ready", url=self.url)
        telling = asyncio.create_task(self._tell(life))
        try:
            yield
        finally:
            telling.cancel()
            self._door.shut()
            await asyncio.gather(telling, return_exceptions=True)

    async def stop(self) -> None:
        await self._server.stop()

    async def _tell(self, life: EngineLife) -> None:
        if self._settings.router:
            await RouterRegistration(life, self._settings.router, self.url).run()

"""An engine's life, its OpenAI door, and a client of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from controlplane.core import engine_events as events
from controlplane.core.engine_state import Hold, HoldKind
from controlplane.core.versions import Term, WeightVersion
from engine_agent.life.engine_life import EngineLife, EngineLifeHolder
from engine_agent.memory.engine import MemorySettings
from engine_agent.openai_door.door import Door
from engine_agent.openai_door.settings import OpenAiSettings
from tests.support.door_app import NativeMemoryEngine, app_over
from tests.support.engine_life import UPDATE, VERSION, commit, started
from tests.support.eventually import PATIENCE_SECONDS, eventually

CHAT = "/v1/chat/completions"
SETTINGS = OpenAiSettings("127.0.0.1:0", wait_seconds=1.0, max_requests=2, max_body_bytes=1000)


class World:
    """A life, its door, and a client of it."""

    def __init__(self, life: EngineLife, settings: OpenAiSettings) -> None:
        self.life = life
        holder = EngineLifeHolder()
        holder.life = life
        self.door = Door(holder, settings, app_over)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.door), base_url="http://door", timeout=10)

    @property
    def engine(self) -> NativeMemoryEngine:
        assert isinstance(self.life.engine, NativeMemoryEngine)
        return self.life.engine

    async def ask(self, **asked: Any) -> httpx.Response:
        return await self.http.post(CHAT, json={"prompt": [1, 2, 3]} | asked)

    def made(self, count: int) -> bool:
        """The one request that is in the engine has so many tokens."""
        return [live.seen >= count for live in self.engine._live.values()] == [True]

    def serve(self, version: WeightVersion) -> None:
        self.life.apply(events.FleetChanged(Term(1), Term(1), frozenset({version})))

    def hold(self, *, present: bool) -> None:
        self.life.apply(events.HoldChanged(Hold(HoldKind.OPERATOR, "ann"), present=present))


async def made(tmp_path: Path, *, seconds_per_token: float = 0.0, settings: OpenAiSettings = SETTINGS) -> World:
    """It serves VERSION."""
    engine = NativeMemoryEngine(MemorySettings(seconds_per_token=seconds_per_token), "e0")
    world = World(await started(tmp_path, engine), settings)
    await world.door.open(world.life)
    commit(world.life, 1)
    await asyncio.wait_for(world.life.installs.outcome(UPDATE), PATIENCE_SECONDS)
    world.serve(VERSION)
    await eventually(lambda: world.life.open)
    return world

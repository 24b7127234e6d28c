"""A real vllm-router is told of a door by the gate; the engine behind the door is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from engine_agent.life.engine_life import EngineLifeHolder
from engine_agent.openai_door import router as registration
from engine_agent.openai_door.running import RunningDoor
from engine_agent.openai_door.settings import OpenAiSettings
from tests.support.door_app import app_over
from tests.support.door_world import World, made
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.vllm_router import vllm_router

pytestmark = pytest.mark.slow

WITHIN = 60.0


async def listed(url: str) -> list[str]:
    async with httpx.AsyncClient(base_url=url) as http:
        try:
            answer = await http.get("/list_workers")
        except httpx.HTTPError:
            return ["no router"]
    urls: list[str] = answer.json()["urls"]
    return urls


def door_of(world: World, router: str) -> RunningDoor:
    holder = EngineLifeHolder()
    holder.life = world.life
    return RunningDoor(holder, OpenAiSettings("127.0.0.1:0", router=router), app_over)


def becomes(router: str, wanted: list[str]) -> Callable[[], object]:
    async def check() -> bool:
        found = await listed(router)
        assert found == wanted, found
        return True

    return check


async def test_a_router_has_the_door_while_the_gate_is_open_and_not_for_a_moment_longer_than_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "GRACE_SECONDS", 0.2)
    world = await made(tmp_path)
    with vllm_router() as router:
        await eventually(becomes(router, []), within=WITHIN)
        door = door_of(world, router)
        async with door.open_for(world.life):
            await eventually(becomes(router, [door.url]), within=WITHIN)
            async with httpx.AsyncClient(base_url=router) as http:
                answer = await http.post("/v1/completions", json={"model": "policy", "prompt": [1, 2]})
                assert answer.headers["x-weightplane-version"] == "1"
            world.hold(present=True)
            await eventually(becomes(router, []), within=WITHIN)
            world.hold(present=False)
            await eventually(becomes(router, [door.url]), within=WITHIN)
        assert await listed(router) == [], "an engine that ends says so first"
        await door.stop()
    await world.life.end("done")


async def test_a_router_that_starts_later_or_anew_is_told_too_and_one_that_is_away_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "AGAIN_SECONDS", 0.3)
    world, port = await made(tmp_path), free_port()
    door = door_of(world, f"http://127.0.0.1:{port}")
    async with door.open_for(world.life):
        assert world.life.open
        for _ in range(2):
            with vllm_router(port=port) as router:
                await eventually(becomes(router, [door.url]), within=WITHIN)
    await asyncio.wait_for(door.stop(), 5)
    await world.life.end("done")

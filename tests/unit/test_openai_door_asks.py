"""The OpenAI door asks as the gRPC ports do: certificates or tokens, and one table of roles."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from controlplane.core.access import HTTP_POLICY, Role
from controlplane.rpc.security import HttpGuard, TlsSettings
from engine_agent.life.engine_life import EngineLifeHolder
from engine_agent.openai_door import door as door_module
from engine_agent.openai_door.running import RunningDoor
from engine_agent.openai_door.settings import OpenAiSettings
from tests.support.certificates import people, token_for
from tests.support.door_app import app_over
from tests.support.door_world import made
from tests.support.http_calls import RUN, bearer, context_of, status

ROUTES = door_module.GENERATING | door_module.READING


@asynccontextmanager
async def door(guard: HttpGuard, tmp_path: Path) -> AsyncIterator[str]:
    """One that serves VERSION."""
    world = await made(tmp_path)
    holder = EngineLifeHolder()
    holder.life = world.life
    running = RunningDoor(holder, OpenAiSettings("127.0.0.1:0", wait_seconds=0.5), app_over, guard)
    try:
        async with running.open_for(world.life):
            yield running.url
    finally:
        await running.stop()
        await world.life.end("the test is over")


def test_every_route_of_the_door_is_in_the_table() -> None:
    assert {f"openai {path}" for _, path in ROUTES} == {r for r in HTTP_POLICY if r.startswith("openai ")}


@pytest.mark.parametrize("role", list(Role))
async def test_a_token_of_each_role_uses_the_door_as_the_table_says(tmp_path: Path, role: Role) -> None:
    tokens = tmp_path / "tokens.toml"
    token = token_for(tokens, role)
    async with door(HttpGuard(TlsSettings(tokens=tokens), RUN), tmp_path) as url:
        for method, path in ROUTES:
            answer = await status(url + path, method, headers=bearer(token))
            allowed = role in HTTP_POLICY[f"openai {path}"]
            assert (answer == (403, "PERMISSION_DENIED")) != allowed, (method, path, answer)
            assert (await status(url + path, method)) == (401, "UNAUTHENTICATED")
        assert (await status(f"{url}/health"))[0] == 200, "the gate is everybody's to see"


async def test_a_door_with_certificates_takes_rollouts_and_nobody_without_one(tmp_path: Path) -> None:
    issue = people(tmp_path)
    async with door(HttpGuard(issue("engine/engine-0"), RUN), tmp_path) as url:
        assert url.startswith("https://")
        assert (await status(f"{url}/v1/chat/completions", "POST", ssl=context_of(issue("rollout"))))[0] == 200
        refused = await status(f"{url}/v1/chat/completions", "POST", ssl=context_of(issue("viewer")))
        assert refused == (403, "PERMISSION_DENIED")
        with pytest.raises(aiohttp.ClientError):
            await status(f"{url}/v1/chat/completions", "POST", ssl=context_of(issue("rollout"), shows=False))

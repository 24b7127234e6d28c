"""A scripted coordinator with scripted engines over real gRPC, and a rollout client of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from controlplane.core import errors as e
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from controlplane.rollout.sample import Sample
from controlplane.rpc.server import RunningServer
from tests.support.eventually import PATIENCE_SECONDS
from tests.support.fake_fleet import (
    FakeEngine,
    Script,
    finish,
    new_fleet,
    says,
    serve_engine,
    serve_fleet,
    tokens,
)
from weightplane.v1 import rollout_pb2

PROMPT = [1, 2, 3]
SAMPLING = SamplingSettings(max_tokens=8)
GOOD = says(tokens(5, 6), tokens(7), finish((1, 0, 3)))
NOT_READY = e.EngineNotReady(engine_id="a", holds="operator")


class World:
    """A scripted fleet and a client of it."""

    def __init__(self) -> None:
        self.fleet = new_fleet()
        self.stack = AsyncExitStack()
        self.server: RunningServer
        self.client: RolloutClient

    async def start(self, **options: Any) -> None:
        self.server = await serve_fleet(self.fleet)
        self.stack.push_async_callback(self.server.stop)
        self.client = await self.stack.enter_async_context(
            RolloutClient(self.server.address, **({"wait_seconds": PATIENCE_SECONDS} | options))
        )

    async def engine(self, name: str, script: Script, **fields: Any) -> FakeEngine:
        engine = FakeEngine(name, script, **fields)
        server = await serve_engine(engine)
        self.stack.push_async_callback(server.stop)
        return engine

    async def generate(self, **options: Any) -> Sample:
        return await self.client.generate(PROMPT, SAMPLING, **options)


def first_then(first: Script, then: Script) -> Script:
    """The first request is answered by one script, those after it by another."""
    asked = []

    async def script(request: rollout_pb2.GenerateRequest) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        asked.append(request)
        async for response in (first if len(asked) == 1 else then)(request):
            yield response

    return script

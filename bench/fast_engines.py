"""Engines that answer at once, one in gRPC and one in HTTP, as processes: what is left is the way to them.

    python -m bench.fast_engines grpc|http

prints its address. The gRPC one speaks Rollout, and WatchRoutes too, in which it names itself; both are bare servicers
of grpc.aio. The HTTP one is what vllm-router needs: /health, /v1/models and /v1/completions. Each answers a request
with the same tokens in one message.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from aiohttp import web

from controlplane.rpc.channels import SERVER_OPTIONS
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc, version_pb2

RUN = "bench-routing"
TOKENS = tuple(range(16))
MODEL = "policy"
VERSION = version_pb2.WeightVersion(term=1, number=1)


def _answer(request: rollout_pb2.GenerateRequest) -> rollout_pb2.GenerateResponse:
    span = rollout_pb2.VersionSpan(version=VERSION, start=0, end=len(TOKENS))
    finish = rollout_pb2.Finish(
        reason=rollout_pb2.FINISH_REASON_LENGTH, spans=[span], prompt_tokens=len(request.prompt_token_ids)
    )
    logprobs = [-1.0] * len(TOKENS)
    return rollout_pb2.GenerateResponse(token_ids=TOKENS, logprobs=logprobs, version=VERSION, finish=finish)


class _Engine(rollout_pb2_grpc.RolloutServicer):
    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        yield _answer(request)


class _Fleet(fleet_pb2_grpc.FleetServicer):
    endpoint = ""

    async def WatchRoutes(
        self, request: fleet_pb2.WatchRoutesRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.WatchRoutesResponse]:
        engine = version_pb2.EngineRef(engine_id="fast", incarnation="1")
        route = fleet_pb2.Route(engine=engine, endpoint=self.endpoint, applied=VERSION)
        yield fleet_pb2.WatchRoutesResponse(run_id=RUN, revision=1, routes=[route], served=[VERSION])
        await asyncio.Event().wait()


async def _serve_grpc() -> None:
    server, fleet = grpc.aio.server(options=SERVER_OPTIONS), _Fleet()  # type: ignore[abstract]  # one call each
    rollout_pb2_grpc.add_RolloutServicer_to_server(_Engine(), server)  # type: ignore[abstract]
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    fleet.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print(fleet.endpoint, flush=True)
    await server.wait_for_termination()


async def _complete(request: web.Request) -> web.Response:
    asked = await request.json()
    choice = {"index": 0, "text": "", "token_ids": TOKENS, "logprobs": [-1.0] * len(TOKENS), "finish_reason": "length"}
    usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": len(TOKENS)}
    whole = {"id": "1", "object": "text_completion", "model": MODEL, "choices": [choice], "usage": usage}
    return web.json_response(whole)


async def _healthy(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def _serve_http() -> None:
    app = web.Application()
    app.add_routes([web.get(path, _healthy) for path in ("/health", "/v1/models")])
    app.add_routes([web.post("/v1/completions", _complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


@contextmanager
def fast_engine(kind: str) -> Iterator[str]:
    """`grpc` or `http`. Its address."""
    process = subprocess.Popen([sys.executable, "-m", __name__, kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(20)


if __name__ == "__main__":
    asyncio.run(_serve_grpc() if sys.argv[1] == "grpc" else _serve_http())

"""What routing adds to a request: RolloutClient before an engine that answers at once, and vllm-router before another.

Contenders, at 1 to 256 requests at once, in turns: a call of the stub on a channel that is there; `RolloutClient`; a
call over HTTP (aiohttp) to an engine that answers as fast; the same through vllm-router. And the coordinator's Rollout
before an in-memory engine's agent, against a call of that agent. A request has 128 prompt tokens, its answer 16 with
log probabilities in one message. The clock: from the call until the answer is there, whole, seen by the caller.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.fast_engines import MODEL, RUN, fast_engine
from bench.harness import Row, percentile
from bench.routing_processes import one_engine_fleet, vllm_router_before
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from controlplane.rpc.channels import open_channel
from weightplane.v1 import rollout_pb2, rollout_pb2_grpc

DEADLINE_SECONDS = 240
QUICK_DEADLINE_SECONDS = 90
PROMPT = tuple(range(100, 228))
MAX_TOKENS = 16
AT_ONCE = (1, 4, 16, 64, 256)
QUICK_AT_ONCE = (1, 16)
AHEAD_UNTIL = 16
"""Requests at once up to which the goal is to be ahead of the router."""
PROXY_AT_ONCE = (1, 16, 64)
"""The coordinator passes on 64 calls at once."""
GOAL_ADDED_MS = 0.3
CALL_SECONDS = 60.0
REQUESTS = 400
"""In one burst, at least."""

Call = Callable[[], Awaitable[None]]


@dataclass
class Bursts:
    """Of one contender at one width."""

    p50_ms: list[float] = field(default_factory=list)
    """By round."""
    p99_ms: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    """Requests in a second."""

    def add(self, seconds: Sequence[float], wall: float) -> None:
        self.p50_ms.append(statistics.median(seconds) * 1e3)
        self.p99_ms.append(percentile(seconds, 99) * 1e3)
        self.rate.append(len(seconds) / wall)

    @property
    def told(self) -> str:
        p50, p99, rate = (statistics.median(v) for v in (self.p50_ms, self.p99_ms, self.rate))
        return f"p50 {p50:.2f} p99 {p99:.2f} ms {rate:.0f}/s"


def measure(quick: bool) -> list[Row]:
    rounds, widths = (2, QUICK_AT_ONCE) if quick else (8, AT_ONCE)
    with ExitStack() as stack:
        engine, http = (stack.enter_context(fast_engine(kind)) for kind in ("grpc", "http"))
        router = stack.enter_context(vllm_router_before(f"http://{http}"))
        found = asyncio.run(_all_widths(_routed(engine, f"http://{http}", router), widths, rounds))
    rows = [_client_row(n, bursts) for n, bursts in found.items()]
    with tempfile.TemporaryDirectory() as directory, one_engine_fleet(Path(directory)) as (coordinator, agent):
        proxied = [n for n in widths if n in PROXY_AT_ONCE]
        found = asyncio.run(_all_widths(_proxied(coordinator, agent), proxied, rounds))
    return rows + [_proxy_row(n, bursts) for n, bursts in found.items()]


async def _all_widths(
    contenders: AbstractAsyncContextManager[Mapping[str, Call]], widths: Sequence[int], rounds: int
) -> dict[int, dict[str, Bursts]]:
    async with contenders as calls:
        return {n: await _in_turns(calls, n, rounds) for n in widths}


# ---- contenders ---------------------------------------------------------------------------------


@asynccontextmanager
async def _routed(engine: str, http: str, router: str) -> AsyncIterator[Mapping[str, Call]]:
    async with (
        open_channel(engine) as channel,
        RolloutClient(engine) as rollouts,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        await _answers(session, router)
        yield {
            "stub": lambda: _ask(channel, RUN),
            "RolloutClient": lambda: _generate(rollouts),
            "HTTP": lambda: _post(session, http),
            "vllm-router": lambda: _post(session, router),
        }


@asynccontextmanager
async def _proxied(coordinator: str, agent: str) -> AsyncIterator[Mapping[str, Call]]:
    async with open_channel(agent) as straight, open_channel(coordinator) as through:
        yield {"engine": lambda: _ask(straight, RUN), "coordinator": lambda: _ask(through, RUN)}


async def _ask(channel: Any, run_id: str) -> None:
    request = rollout_pb2.GenerateRequest(
        run_id=run_id,
        model=MODEL,
        prompt_token_ids=PROMPT,
        sampling=rollout_pb2.SamplingParams(max_tokens=MAX_TOKENS),
    )
    tokens = 0
    async for response in rollout_pb2_grpc.RolloutStub(channel).Generate(request, timeout=CALL_SECONDS):
        tokens += len(response.token_ids)
    assert tokens == MAX_TOKENS


async def _generate(rollouts: RolloutClient) -> None:
    sample = await rollouts.generate(PROMPT, SamplingSettings(max_tokens=MAX_TOKENS, logprobs=0))
    assert len(sample.tokens) == MAX_TOKENS


async def _post(session: aiohttp.ClientSession, base: str) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "logprobs": 0}
    async with session.post(f"{base}/v1/completions", json=asked) as response:
        answer = await response.json()
    assert len(answer["choices"][0]["token_ids"]) == MAX_TOKENS


async def _answers(session: aiohttp.ClientSession, router: str) -> None:
    """Wait until the router does: it looks at its workers first."""
    deadline = time.monotonic() + CALL_SECONDS
    while True:
        try:
            await _post(session, router)
            return
        except (aiohttp.ClientError, KeyError, ValueError):
            if time.monotonic() > deadline:
                raise SystemExit("vllm-router does not answer") from None
            await asyncio.sleep(0.2)


# ---- bursts -------------------------------------------------------------------------------------


async def _in_turns(calls: Mapping[str, Call], at_once: int, rounds: int) -> dict[str, Bursts]:
    """Every contender in every round; the first round warms up."""
    bursts = {name: Bursts() for name in calls}
    names = list(calls)
    for index in range(rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            started = time.perf_counter()
            seconds = await _burst(calls[name], at_once)
            if index:
                bursts[name].add(seconds, time.perf_counter() - started)
    return bursts


async def _burst(call: Call, at_once: int) -> list[float]:
    seconds: list[float] = []
    left = max(REQUESTS, 2 * at_once)

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            started = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - started)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
    return seconds


# ---- rows ---------------------------------------------------------------------------------------


def added_ms(through: Sequence[float], direct: Sequence[float]) -> float:
    """What the way adds to p50: the median of the rounds' own differences."""
    return statistics.median(a - b for a, b in zip(through, direct, strict=True))


def _client_row(at_once: int, bursts: Mapping[str, Bursts]) -> Row:
    ours = added_ms(bursts["RolloutClient"].p50_ms, bursts["stub"].p50_ms)
    other = added_ms(bursts["vllm-router"].p50_ms, bursts["HTTP"].p50_ms)
    goals = [f"ours <= {GOAL_ADDED_MS} ms"] if at_once == 1 else []
    goals += ["ours < other"] if at_once <= AHEAD_UNTIL else []
    met = (at_once > 1 or ours <= GOAL_ADDED_MS) and ours < other
    return Row(
        name=f"RolloutClient, {at_once} at once",
        what="what it adds to p50 of a direct call, against what vllm-router adds to one over HTTP",
        ours=ours,
        other=other,
        unit="ms",
        ratio=ours / other if other > 0 else None,
        goal=" and ".join(goals),
        met=met if goals else None,
        note="; ".join(f"{name}: {b.told}" for name, b in bursts.items()),
        samples={name: b.p50_ms for name, b in bursts.items()},
    )


def _proxy_row(at_once: int, bursts: Mapping[str, Bursts]) -> Row:
    return Row(
        name=f"through the coordinator, {at_once} at once",
        what="p50 of Rollout at the coordinator, against the same call of the engine's agent",
        ours=statistics.median(bursts["coordinator"].p50_ms),
        other=statistics.median(bursts["engine"].p50_ms),
        unit="ms",
        ratio=statistics.median(bursts["coordinator"].p50_ms) / statistics.median(bursts["engine"].p50_ms),
        goal="",
        met=None,
        note="; ".join(f"{name}: {b.told}" for name, b in bursts.items()),
        samples={name: b.p50_ms for name, b in bursts.items()},
    )

"""Rollouts through a real coordinator process, to real engine agents: a crowd, callers that leave, a late version."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from controlplane.core import errors as e
from controlplane.rpc.channels import open_channel
from controlplane.rpc.errors import from_rpc_error
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, local_fleet
from tests.support.ports import free_port
from tests.support.writer import Weights
from weightplane.v1 import operator_pb2, operator_pb2_grpc, rollout_pb2, rollout_pb2_grpc

LIMIT = 64
CROWD = 200
ROUNDS = 2
HEARTBEAT_SECONDS, TTL_SECONDS = 0.2, 3.0
FLAT_BYTES = 24 << 20
"""How much a coordinator may be larger after the last round than after the first: nothing is kept of a call."""


def start(command: str, **settings: Any) -> subprocess.Popen[bytes]:
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    line = [sys.executable, "-m", "controlplane.cli.main", command, "--log-level", "WARNING", *words]
    return subprocess.Popen(line, stderr=subprocess.DEVNULL)


@contextmanager
def processes(directory: Path, engines: int) -> Iterator[tuple[str, psutil.Process]]:
    """A coordinator and in-memory engines that serve what they load, each a process; its address and process."""
    address = f"127.0.0.1:{free_port()}"
    times = {"heartbeat_seconds": HEARTBEAT_SECONDS, "lease_ttl_seconds": TTL_SECONDS}
    common = {"run_id": RUN, "state_dir": directory}
    started = [start("coordinator", listen=address, max_rollout_calls=LIMIT, **times, **common)]
    for i in range(engines):
        mine: dict[str, Any] = {"backend": "memory", "initial": "serve", "memory.seconds_per_token": 0.02}
        started.append(start("engine", engine_id=f"e{i}", coordinator=address, **mine, **common))
    try:
        yield address, psutil.Process(started[0].pid)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


@dataclass
class Fleet:
    coordinator: psutil.Process
    rollout: Any
    operator: Any
    channel: grpc.aio.Channel

    async def engines(self) -> list[operator_pb2.EngineView]:
        response = await self.operator.GetFleet(operator_pb2.GetFleetRequest(), timeout=60)
        return list(response.fleet.engines)

    async def all_routable(self) -> bool:
        found = await self.engines()
        return len(found) == 2 and all(engine.routable for engine in found)

    async def live_requests(self) -> int:
        return sum(engine.status.live_requests for engine in await self.engines())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    with processes(tmp_path_factory.mktemp("proxy"), engines=2) as made:
        yield made


@pytest.fixture
async def fleet(started: tuple[str, psutil.Process]) -> AsyncIterator[Fleet]:
    address, coordinator = started
    async with open_channel(address) as channel:
        stub: Any = operator_pb2_grpc.OperatorStub(channel)
        made = Fleet(coordinator, rollout_pb2_grpc.RolloutStub(channel), stub, channel)

        async def serves() -> bool:
            try:
                return await made.all_routable()
            except grpc.aio.AioRpcError:
                return False

        await eventually(serves, within=120)
        yield made


def asked(tokens: int, **changed: Any) -> rollout_pb2.GenerateRequest:
    values: dict[str, Any] = {"run_id": RUN, "model": "policy", "prompt_token_ids": [1, 2, 3]}
    sampling = rollout_pb2.SamplingParams(max_tokens=tokens)
    return rollout_pb2.GenerateRequest(sampling=sampling, **(values | changed))


async def outcome(fleet: Fleet, tokens: int) -> str:
    """`whole`, or the reason of a refusal."""
    got = 0
    try:
        async for response in fleet.rollout.Generate(asked(tokens), timeout=200):
            got += len(response.token_ids)
    except grpc.aio.AioRpcError as error:
        refused = from_rpc_error(error)
        assert isinstance(refused, e.LimitExceeded), str(refused)
        assert (refused.limit, refused.got) == (LIMIT, LIMIT + 1)
        return refused.reason
    assert got == tokens
    return "whole"


async def silent(fleet: Fleet) -> set[str]:
    """Names of engines that were UNKNOWN at some moment, for as long as this runs."""
    found: set[str] = set()
    try:
        async for response in fleet.operator.WatchFleet(operator_pb2.WatchFleetRequest()):
            found |= {engine.status.engine.engine_id for engine in response.fleet.engines if not engine.known}
    except asyncio.CancelledError:
        return found
    return found


async def test_a_crowd_is_refused_and_starves_no_heartbeat(fleet: Fleet) -> None:
    watching = asyncio.create_task(silent(fleet))
    sizes = []
    for _ in range(ROUNDS):
        outcomes = Counter(await asyncio.gather(*(outcome(fleet, 40) for _ in range(CROWD))))
        assert outcomes.keys() == {"whole", "LIMIT_EXCEEDED"}
        assert outcomes["whole"] >= LIMIT, "who comes when another has ended has its place"
        sizes.append(fleet.coordinator.memory_info().rss)
    watching.cancel()

    assert await watching == set()
    assert sizes[-1] - sizes[0] < FLAT_BYTES, sizes
    assert await fleet.all_routable()


async def test_callers_that_go_away_leave_nothing_running_in_the_engines(fleet: Fleet) -> None:
    calls = [fleet.rollout.Generate(asked(4000)) for _ in range(16)]
    await asyncio.gather(*(call.read() for call in calls))
    await eventually(lambda: _some(fleet))

    for call in calls:
        call.cancel()

    await eventually(lambda: _none(fleet))


async def _some(fleet: Fleet) -> bool:
    return await fleet.live_requests() > 0


async def _none(fleet: Fleet) -> bool:
    return await fleet.live_requests() == 0


async def test_a_sample_that_wants_a_version_waits_until_the_fleet_has_it(tmp_path: Path) -> None:
    async with local_fleet(tmp_path) as fleet:
        await fleet.push(Weights())
        stub: Any = rollout_pb2_grpc.RolloutStub(fleet.channel(fleet.address))
        pin = rollout_pb2.Pin()
        pin.min_version.number, pin.min_version.term = 2, fleet.term
        running = asyncio.create_task(_numbers(stub.Generate(asked(3, pin=pin), timeout=60)))
        await fleet.push(Weights())

        assert await running == {2}


async def _numbers(call: Any) -> set[int]:
    return {response.version.number async for response in call if response.token_ids}

"""What our channel and server options do. gRPC ignores a misspelt option in silence, so each is pinned by behaviour."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from controlplane.coordinator.daemon import CoordinatorSettings, run_coordinator
from controlplane.exit_codes import ExitCode
from controlplane.rpc.channels import KEEPALIVE_SECONDS, PING_TIMEOUT_SECONDS, open_channel
from tests.support.eventually import eventually
from weightplane.v1 import operator_pb2, operator_pb2_grpc

MARGIN_SECONDS = 10


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A coordinator in a process of its own, and its address."""
    code = (
        "import asyncio; from pathlib import Path;"
        "from controlplane.coordinator.daemon import CoordinatorSettings, run_coordinator;"
        f"asyncio.run(run_coordinator(CoordinatorSettings('127.0.0.1:0', Path({str(tmp_path / 'state')!r}),"
        f" address_file=Path({str(tmp_path / 'address')!r}))))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await eventually((tmp_path / "address").exists)
    yield process, (tmp_path / "address").read_text()
    process.kill()
    await process.wait()


async def test_a_stopped_peer_is_noticed_within_the_budget(
    coordinator: tuple[asyncio.subprocess.Process, str],
) -> None:
    process, address = coordinator
    async with open_channel(address) as channel:
        watch = operator_pb2_grpc.OperatorStub(channel).WatchFleet(operator_pb2.WatchFleetRequest())
        frames = aiter(watch)
        await anext(frames)
        os.kill(process.pid, signal.SIGSTOP)
        stopped = time.monotonic()

        async def read_on() -> None:
            async for _ in frames:
                pass

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asyncio.wait_for(read_on(), KEEPALIVE_SECONDS + PING_TIMEOUT_SECONDS + MARGIN_SECONDS)
        os.kill(process.pid, signal.SIGCONT)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - stopped > PING_TIMEOUT_SECONDS - 1, "it was a ping that noticed, not something else"


async def test_a_silent_stream_lives_on_and_is_not_sent_away_for_its_pings(
    coordinator: tuple[asyncio.subprocess.Process, str],
) -> None:
    async with open_channel(coordinator[1]) as channel:
        stub = operator_pb2_grpc.OperatorStub(channel)
        frames = aiter(stub.WatchFleet(operator_pb2.WatchFleetRequest()))
        began = time.monotonic()
        while time.monotonic() - began < KEEPALIVE_SECONDS + 2:
            await anext(frames)


async def test_two_coordinators_on_one_port_the_second_ends_with_its_code(
    coordinator: tuple[asyncio.subprocess.Process, str], tmp_path: Path
) -> None:
    settings = CoordinatorSettings(coordinator[1], tmp_path / "another")
    assert await run_coordinator(settings) == ExitCode.PORT_IN_USE


async def test_two_coordinators_on_one_ledger_the_second_ends_with_its_code(
    coordinator: tuple[asyncio.subprocess.Process, str], tmp_path: Path
) -> None:
    settings = CoordinatorSettings("127.0.0.1:0", tmp_path / "state")
    assert await run_coordinator(settings) == ExitCode.LEDGER


async def test_s3_a_proxy_of_the_environment_does_not_carry_our_calls(
    coordinator: tuple[asyncio.subprocess.Process, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    async with open_channel(coordinator[1]) as channel:
        stub = operator_pb2_grpc.OperatorStub(channel)
        response = await stub.GetFleet(operator_pb2.GetFleetRequest(), timeout=60)
    assert response.fleet.run_id == "default"

"""Rates: who calls too often is refused alone, and told when to come again; a thousand agents are not touched."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from controlplane.config import ConfigError, load_values
from controlplane.coordinator.daemon import CoordinatorSettings
from controlplane.core.access import POLICY, Role
from controlplane.core.errors import RateLimited, Unauthenticated
from controlplane.core.rates import MAX_CALLERS, UNLIMITED, CallRates, RateSettings
from controlplane.rpc.channels import open_channel
from controlplane.rpc.errors import from_rpc_error
from controlplane.rpc.security import ServerSecurity, TlsSettings
from controlplane.rpc.server import start_server
from tests.support.certificates import token_for
from tests.support.local_fleet import LocalFleet
from tests.support.writer import Weights
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, operator_pb2, operator_pb2_grpc

FEW = RateSettings(calls_per_second=0.01, burst=5)


def admitted(rates: CallRates, caller: str, times: list[float]) -> int:
    count = 0
    for now in times:
        try:
            rates.take(caller, now)
            count += 1
        except RateLimited:
            continue
    return count


def test_a_burst_goes_through_and_then_as_many_as_the_rate_allows() -> None:
    rates = CallRates(RateSettings(calls_per_second=10, burst=20))
    assert admitted(rates, "a", [0.0] * 100) == 20
    assert admitted(rates, "a", [i / 100 for i in range(100, 1100)]) in (109, 110, 111)


def test_the_refusal_says_when_one_more_is_taken_and_then_it_is() -> None:
    rates = CallRates(RateSettings(calls_per_second=4, burst=1))
    rates.take("a", 0.0)
    with pytest.raises(RateLimited) as refused:
        rates.take("a", 0.1)
    assert refused.value.retry_seconds == 0.15
    rates.take("a", 0.1 + refused.value.retry_seconds)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 50)), max_size=200))
def test_no_caller_gets_more_than_its_own_bucket_whatever_the_others_and_the_clock_do(
    calls: list[tuple[str, float]],
) -> None:
    settings = RateSettings(calls_per_second=2, burst=3)
    rates, got = CallRates(settings), Counter[str]()
    for caller, now in calls:  # also backwards
        got[caller] += admitted(rates, caller, [now])
    for caller in "ab":
        alone = CallRates(settings)
        assert got[caller] == admitted(alone, caller, [now for c, now in calls if c == caller])
        assert got[caller] <= settings.burst + 2 * 50 + 1


def test_memory_is_bounded_whoever_calls() -> None:
    rates = CallRates(FEW)
    for i in range(3 * MAX_CALLERS):
        rates.take(f"caller {i}", float(i))
    assert len(rates._buckets) == MAX_CALLERS


def test_zero_limits_nobody_and_what_means_nothing_is_refused() -> None:
    assert admitted(CallRates(RateSettings(calls_per_second=0)), "a", [0.0] * 9999) == 9999
    for wrong in ({"calls_per_second": -1.0}, {"burst": 0}, {"calls_per_second": float("nan")}):
        with pytest.raises(ConfigError):
            load_values(CoordinatorSettings, {"rate": wrong})


def test_what_is_not_counted_is_what_agents_live_by_and_every_name_is_an_rpc() -> None:
    assert set(POLICY) >= UNLIMITED
    counted = {m for m in POLICY if m not in UNLIMITED}
    assert not any("/Rollout/" in m or m.endswith(("/Session", "/UpdateWeights")) for m in counted)
    assert all(m in counted for m in POLICY if "/Operator/" in m or "/Lifecycle/" in m)


class Fleet(fleet_pb2_grpc.FleetServicer):
    """A session that lives as long as its agent."""

    async def Session(self, request_iterator: Any, context: Any) -> Any:
        async for _ in request_iterator:
            yield fleet_pb2.SessionResponse()


class Operator(operator_pb2_grpc.OperatorServicer):
    async def GetFleet(self, request: Any, context: Any) -> operator_pb2.GetFleetResponse:
        return operator_pb2.GetFleetResponse()


def made(servicer: Any) -> Any:
    """What it does not answer is not called here."""
    return servicer()


async def serve(tls: TlsSettings, rates: RateSettings) -> Any:
    def fleet(server: grpc.aio.Server) -> str:
        fleet_pb2_grpc.add_FleetServicer_to_server(made(Fleet), server)
        return "weightplane.v1.Fleet"

    def operator(server: grpc.aio.Server) -> str:
        operator_pb2_grpc.add_OperatorServicer_to_server(made(Operator), server)
        return "weightplane.v1.Operator"

    return await start_server("127.0.0.1:0", [fleet, operator], ServerSecurity(tls, rates=rates))


async def look(channel: grpc.aio.Channel, **more: Any) -> grpc.aio.AioRpcError | None:
    try:
        await operator_pb2_grpc.OperatorStub(channel).GetFleet(operator_pb2.GetFleetRequest(), timeout=60, **more)
    except grpc.aio.AioRpcError as error:
        return error
    return None


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


async def test_one_who_floods_is_refused_with_a_time_and_its_neighbour_on_the_same_host_is_not(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    ann, bob = token_for(tokens, Role.VIEWER, "ann"), token_for(tokens, Role.VIEWER, "bob")
    server = await serve(TlsSettings(tokens=tokens), FEW)
    async with open_channel(server.address) as channel:
        answers = await asyncio.gather(*(look(channel, metadata=bearer(ann)) for _ in range(50)))
        refused = [a for a in answers if a is not None]
        assert len(refused) == 45
        assert await look(channel, metadata=bearer(bob)) is None
    await server.stop()
    error = refused[0]
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    typed = from_rpc_error(error)
    assert isinstance(typed, RateLimited)
    assert typed.caller == "weightplane://*/viewer/ann"
    retry = error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    assert any(d.Unpack(retry) for d in status.details)
    assert 0 < retry.retry_delay.ToMilliseconds() <= 100_000


async def test_who_guesses_tokens_is_slowed_and_whoever_has_one_is_not(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    ann = token_for(tokens, Role.VIEWER, "ann")
    server = await serve(TlsSettings(tokens=tokens), FEW)
    async with open_channel(server.address) as channel:
        errors = [await look(channel, metadata=bearer(f"wpt_{i}")) for i in range(12)]
        kinds = [type(from_rpc_error(error)) for error in errors if error is not None]
        assert kinds == [Unauthenticated] * 5 + [RateLimited] * 7
        assert await look(channel, metadata=bearer(ann)) is None
    await server.stop()


async def test_a_thousand_sessions_of_one_host_and_their_heartbeats_pass_beside_a_flood() -> None:
    server = await serve(TlsSettings(), FEW)
    async with open_channel(server.address) as channel:
        flood = [asyncio.ensure_future(look(channel)) for _ in range(200)]

        async def agent() -> int:
            session = fleet_pb2_grpc.FleetStub(channel).Session(timeout=250)
            for _ in range(3):
                await session.write(fleet_pb2.SessionRequest(goodbye=fleet_pb2.Goodbye(reason="x")))
                assert await session.read() is not grpc.aio.EOF
            session.cancel()
            return 3

        beats = sum(await asyncio.gather(*(agent() for _ in range(1000))))
        refused = sum(error is not None for error in await asyncio.gather(*flood))
    await server.stop()
    assert beats == 3000
    assert refused >= 190


async def test_a_fleet_whose_operator_service_is_flooded_goes_on_to_push(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path)
    try:
        await fleet.start_coordinator(rate=RateSettings(calls_per_second=0.5, burst=300))
        fleet.start_engine("e0")
        await fleet.wait_for_engines(1)
        await fleet.take_lease()
        async with open_channel(fleet.address) as channel:
            errors = await asyncio.gather(*(look(channel) for _ in range(500)))
        assert sum(error is not None for error in errors) >= 200
        state = await fleet.push(Weights())
        assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    finally:
        await fleet.close()

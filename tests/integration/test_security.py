"""Fleets behind TLS and tokens: each part speaks as itself, and as nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from controlplane.core import errors as e
from controlplane.core.access import Role
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from controlplane.rpc.channels import open_channel
from controlplane.rpc.errors import from_rpc_error
from controlplane.rpc.security import TlsSettings
from tests.support.certificates import people, token_for
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.writer import Weights
from weightplane.v1 import (
    fleet_pb2,
    lifecycle_pb2,
    lifecycle_pb2_grpc,
    weight_update_pb2,
)

SECONDS = 60.0


# ---- a fleet under TLS ----


async def test_a_fleet_under_mutual_tls_pushes_and_generates(tmp_path: Path) -> None:
    made, weights = people(tmp_path), Weights()
    fleet = LocalFleet(tmp_path, made)
    try:
        await fleet.start_coordinator()
        for engine in ("e0", "e1"):
            fleet.start_engine(engine)
        await fleet.wait_for_engines(2)
        await fleet.take_lease()
        state = await fleet.push(weights)
        assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
        async with RolloutClient(fleet.address, run_id=RUN, tls=made("rollout/loop")) as rollouts:
            sample = await rollouts.generate([1, 2, 3], SamplingSettings(max_tokens=4))
        assert sample.spans[0].version.number == 1
    finally:
        await fleet.close()


async def test_a_fleet_with_tokens_pushes_and_generates_on_loopback_without_tls(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"

    def tls_of(node: str) -> TlsSettings:
        role, _, name = node.partition("/")
        file = tmp_path / f"{role}-{name.replace('*', 'any')}.token"
        if not file.exists():
            file.write_text(token_for(tokens, Role(role), name))
        return TlsSettings(tokens=tokens, token=file)

    fleet = LocalFleet(tmp_path, tls_of)
    try:
        await fleet.start_coordinator()
        fleet.start_engine("e0")
        await fleet.wait_for_engines(1)
        await fleet.take_lease()
        state = await fleet.push(Weights())
        assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
        async with RolloutClient(fleet.address, run_id=RUN, tls=tls_of("rollout/loop")) as rollouts:
            assert (await rollouts.generate([1, 2, 3], SamplingSettings(max_tokens=2))).tokens
    finally:
        await fleet.close()


async def test_an_engine_with_another_engines_certificate_ends_with_the_refusal(tmp_path: Path) -> None:
    made = people(tmp_path)
    fleet = LocalFleet(tmp_path, lambda node: made("engine/e1" if node == "engine/e0" else node))
    try:
        await fleet.start_coordinator()
        fleet.start_engine("e0")
        with structlog.testing.capture_logs() as logs:
            assert await asyncio.wait_for(fleet.tasks.pop("e0"), SECONDS) == 64
        told = [entry for entry in logs if entry["event"] == "session_refused"]
        assert [entry["reason"] for entry in told] == ["IDENTITY_MISMATCH"]
        assert "weightplane://*/engine/e1 may not speak as engine e0" in told[0]["text"]
    finally:
        await fleet.close()


async def test_inv_7_a_term_is_its_holders_own(tmp_path: Path) -> None:
    """Terms are small numbers: whoever guesses one must still be the trainer that it was given to."""
    made = people(tmp_path)
    fleet = LocalFleet(tmp_path, made)
    try:
        await fleet.start_coordinator()
        fleet.start_engine("e0")
        await fleet.wait_for_engines(1)
        fleet.channels[fleet.address] = open_channel(fleet.address, made("trainer/one"))
        await fleet.take_lease(trainer_id="one")
        fleet.channels[fleet.address] = open_channel(fleet.address, made("trainer/two"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fleet.begin()
        error = from_rpc_error(refused.value)
        assert isinstance(error, e.IdentityMismatch)
        assert error.claimed == "trainer one"
        assert await _hello_as(fleet, "one") is grpc.StatusCode.PERMISSION_DENIED
    finally:
        await fleet.close()


async def _hello_as(fleet: LocalFleet, trainer_id: str) -> grpc.StatusCode:
    call: Any = fleet.fleet.Session()
    rank = fleet_pb2.TrainerRankInfo(rank=0, host_id="elsewhere", device_uuid="CPU-other")
    hello = fleet_pb2.TrainerHello(
        run_id=RUN, model="policy", trainer_id=trainer_id, incarnation="x", ranks=[rank], takeover=True
    )
    await call.write(fleet_pb2.SessionRequest(trainer_hello=hello))
    code: grpc.StatusCode = await asyncio.wait_for(call.code(), SECONDS)
    return code


async def test_inv_7_a_trainer_does_not_write_as_the_coordinator(tmp_path: Path) -> None:
    made = people(tmp_path)
    fleet = LocalFleet(tmp_path, made)
    try:
        await fleet.start_coordinator()
        fleet.start_engine("e0")
        await fleet.wait_for_engines(1)
        await fleet.take_lease()
        begun = await fleet.begin()
        endpoint = begun.plan.assignments[0].endpoint
        fleet.channels[endpoint] = open_channel(endpoint, made("trainer/one"))
        stream = fleet.stream(begun, "e0", writer=weight_update_pb2.UPDATE_WRITER_COORDINATOR, writer_term=99)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.open()
        assert isinstance(from_rpc_error(refused.value), e.IdentityMismatch)
    finally:
        await fleet.close()


async def test_a_trainer_takes_and_gives_back_devices_in_its_own_name(tmp_path: Path) -> None:
    made = people(tmp_path)
    fleet = LocalFleet(tmp_path, made)
    try:
        await fleet.start_coordinator()
        fleet.start_engine("e0")
        await fleet.wait_for_engines(1)
        engine = await fleet.engine("e0")
        life: dict[str, Any] = {"run_id": RUN, "engine": engine.status.engine}
        async with open_channel(engine.endpoint, made("trainer/two")) as channel:
            stub: Any = lifecycle_pb2_grpc.LifecycleStub(channel)
            sleep, wake = lifecycle_pb2.SleepRequest, lifecycle_pb2.WakeUpRequest
            for asked in (
                stub.Sleep(sleep(**life, owner="trainer:one", level=1), timeout=SECONDS),
                stub.WakeUp(wake(**life, owner="trainer:one"), timeout=SECONDS),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await asked
                assert isinstance(from_rpc_error(refused.value), e.IdentityMismatch)
            for asked in (
                stub.WakeUp(wake(**life, owner="trainer:two"), timeout=SECONDS),
                stub.Sleep(sleep(**life, owner="trainer:two", level=1), timeout=SECONDS),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await asked
                assert isinstance(from_rpc_error(refused.value), e.InvalidRequest), "it says in which of its turns"
            turn = lifecycle_pb2.DeviceTurn(term=1, number=1)
            await stub.Sleep(sleep(**life, owner="trainer:two", level=1, turn=turn), timeout=SECONDS)
    finally:
        await fleet.close()

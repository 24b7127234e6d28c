"""A trainer's real ranks push to engines that install as the bytes come, beside one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_agent.memory.engine import MemoryEngine
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.obedient import ObedientRanks
from tests.support.toy_rank import Script
from tests.support.toy_trainer import fleet_for_toys, segments, start_engine, toy_trainer
from weightplane.v1 import engine_pb2, operator_pb2, operator_pb2_grpc, weight_update_pb2

pytestmark = pytest.mark.timeout(400)


def installing(engines: list[MemoryEngine]) -> bool:
    """A part of a version is in its weights."""
    return any(engine._streaming is not None and engine._streaming.fresh for engine in engines)


async def tokens(fleet: LocalFleet) -> list[list[int]]:
    return [(await fleet.generate(e, 8))[0] for e in ("e0", "e1")]


@pytest.mark.parametrize("transport", ["shared_memory", "inline", "broadcast"])
async def test_a_streaming_and_a_staged_engine_come_to_the_same_weights(tmp_path: Path, transport: str) -> None:
    async with (
        fleet_for_toys(tmp_path, engines=1, transport=transport) as fleet,
        toy_trainer(fleet.address, link_host="127.0.0.1") as trainer,
    ):
        start_engine(fleet, "e1", apply="streaming")
        await fleet.wait_for_engines(2)
        ranks = await ObedientRanks.start(trainer)
        for n in (1, 2, 3):
            await fleet.settled()  # its gates are open: none is optional
            [heard, _] = await ranks.all("push", step=n)
            assert (heard["version"], heard["status"]) == (n, "COMMITTED")
            assert heard["outcomes"] == {"e0": "APPLIED", "e1": "APPLIED"}
        assert await ranks.leave() == [0, 0]
        staged, streamed = await tokens(fleet)
        assert staged == streamed
    await eventually(lambda: segments() == [])


async def test_the_plan_says_how_each_engine_installs_and_why(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        start_engine(fleet, "e1", apply="streaming")
        await fleet.wait_for_engines(2)
        ranks = await ObedientRanks.start(trainer)
        stub: Any = operator_pb2_grpc.OperatorStub(fleet.channel(fleet.address))
        found = await stub.Plan(operator_pb2.PlanRequest(), timeout=60)
        assert await ranks.leave() == [0, 0]
        staged, streaming = found.plan.assignments
        assert staged.apply == weight_update_pb2.APPLY_STAGED
        assert (streaming.apply, streaming.reason.partition("; streaming")[1]) == (
            weight_update_pb2.APPLY_STREAMING,
            "; streaming",
        )


async def test_inv4_a_worker_that_fails_in_mid_stream_is_healed_by_the_next_push(
    tmp_path: Path, failpoint: Path
) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        start_engine(fleet, "e1", apply="streaming")
        await fleet.wait_for_engines(2)
        (failpoint / "worker.install").write_text("raise after=3")
        ranks = await trainer.start_ranks(Script(steps=2))
        assert [await r.code() for r in ranks] == [0, 0]
        staged, streamed = await tokens(fleet)
        assert staged == streamed
    await eventually(lambda: segments() == [])


async def test_inv4_a_leader_killed_in_mid_stream_leaves_a_streaming_engine_shut(
    tmp_path: Path, failpoint: Path, engines: list[MemoryEngine]
) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        start_engine(fleet, "e0", apply="streaming")
        await fleet.wait_for_engines(1)
        (failpoint / "rank.between_chunks").write_text("hold after=6")
        (leader, _) = await trainer.start_ranks(Script(steps=1))
        await eventually((failpoint / "rank.between_chunks.reached").exists)
        await eventually(lambda: installing(engines), within=8)  # it is let go by itself after 10 s
        leader.process.kill()

        async def shut() -> engine_pb2.EngineStatus:
            status = await fleet.status("e0")
            assert (status.weights, status.gate_open) == (engine_pb2.WEIGHTS_STATE_POISONED, False)
            return status

        status = await eventually(shut)
        assert "went away" in status.update.error_message

"""What becomes of samples while weights come, over real gRPC, with in-memory engines: spans, pins, and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from controlplane import failpoints
from controlplane.rpc.errors import from_rpc_error
from tests.cases.engines import Hands
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet, local_fleet
from tests.support.writer import Weights
from weightplane.v1 import engine_pb2, fleet_pb2, lifecycle_pb2, lifecycle_pb2_grpc, version_pb2


@pytest.fixture
async def fleet(tmp_path: Path, hands: Hands) -> AsyncIterator[LocalFleet]:
    async with local_fleet(tmp_path, seconds_per_token=0.002) as running:
        yield running


async def test_r4_samples_cut_by_poison_end_with_the_spans_they_have(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.push(Weights())
    samples = [asyncio.create_task(fleet.generate(e, 4000)) for e in ("e0", "e1")]

    async def both_run() -> bool:
        return all([(await fleet.status(e)).live_requests for e in ("e0", "e1")])

    await eventually(both_run)
    monkeypatch.setenv(failpoints.DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "worker.install").write_text("raise")
    state = await fleet.push(Weights())
    poisoned = next(o.engine.engine_id for o in state.engines if o.stage == engine_pb2.UPDATE_STAGE_FAILED)
    tokens, spans, reason = await samples[("e0", "e1").index(poisoned)]
    assert reason == "FINISH_REASON_ABORT"
    assert spans == [(1, 0, len(tokens))]
    for sample in samples:
        sample.cancel()


async def test_inv11_live_samples_cross_a_border_at_the_quiesced_token(hands: Hands, fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    for engine_id in ("e0", "e1"):
        hands[engine_id].limit_samples(250)
    samples = [asyncio.create_task(fleet.generate(e, 300)) for e in ("e0", "e1") * 8]

    async def all_run() -> bool:
        return [(await fleet.status(e)).live_requests for e in ("e0", "e1")] == [8, 8]

    await eventually(all_run)
    await fleet.push(Weights())
    for hand in hands.values():
        hand.limit_samples(None)
    for tokens, spans, reason in await asyncio.gather(*samples):
        assert reason == "FINISH_REASON_LENGTH"
        assert len(tokens) == 300
        assert [s[0] for s in spans] == [1, 2]
        assert spans[0][2] == spans[1][1]
        assert (spans[0][1], spans[1][2]) == (0, 300)


async def test_v2_an_update_to_a_paused_engine_is_applied_and_stays_paused(fleet: LocalFleet) -> None:
    view = await fleet.engine("e0")
    stub = lifecycle_pb2_grpc.LifecycleStub(fleet.channel(view.endpoint))
    fence = {"run_id": RUN, "engine": view.status.engine, "owner": "me"}
    await stub.PauseGeneration(lifecycle_pb2.PauseGenerationRequest(**fence))  # type: ignore[arg-type]
    assert (await fleet.push(Weights())).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    status = await fleet.status("e0")
    assert (status.applied.number, status.word, status.gate_open) == (1, "held", False)
    waiting = asyncio.create_task(fleet.generate("e0", 3, wait=60))

    async def one_waits() -> bool:
        return (await fleet.status("e0")).live_requests == 0 and not waiting.done()

    await eventually(one_waits)
    await stub.ResumeGeneration(lifecycle_pb2.ResumeGenerationRequest(**fence))  # type: ignore[arg-type]
    assert (await waiting)[1] == [(1, 0, 3)]


async def test_a_pin_that_is_not_met_is_refused_with_both_versions(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await fleet.generate("e0", 3, min_version=version_pb2.WeightVersion(term=1, number=9), wait=0.1)
    refusal = from_rpc_error(error.value)
    assert (refusal.reason, refusal.metadata()) == ("VERSION_UNAVAILABLE", {"wanted": "1.9 or later", "applied": "1.1"})


async def test_requests_wait_outside_the_gate_for_the_first_version(fleet: LocalFleet) -> None:
    waiting = asyncio.create_task(fleet.generate("e0", 3, wait=60))
    await fleet.push(Weights())
    assert (await waiting)[1] == [(1, 0, 3)]

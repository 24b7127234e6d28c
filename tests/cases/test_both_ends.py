"""P4: an error at either end of a push ends both, in time, and its text reaches whoever called.

Real ranks under a real trainer agent, real engine agents; what fails is armed by name, so no test waits for luck.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import failpoints
from controlplane.core.errors import ChecksumMismatch, EngineDied, InstallFailed
from controlplane.rpc.server import start_server
from tests.cases.engines import lay_hands
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.stream_attempts import FakeAgent, attempt, refusing
from tests.support.toy_rank import Script
from tests.support.toy_trainer import ToyTrainer, fleet_for_toys, segments, toy_trainer
from trainer_agent.agent import pusher
from trainer_agent.agent.stuck import LOOK_SECONDS
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import (
    engine_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    layout_pb2,
    version_pb2,
    weight_update_pb2,
    weight_update_pb2_grpc,
)

PUSH_SECONDS = 60.0
PROMPTLY = 30.0
"""An error does not wait for the push's limit, whatever else the machine does."""
MUTE_SECONDS = 5.0
"""Time enough to come to the engine."""
MARGIN = LOOK_SECONDS + 20.0
"""Beyond a limit: who was waited for is looked at first, and the machine may be busy."""


@pytest.fixture(autouse=True)
def _no_push_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure is the push's."""
    monkeypatch.setattr(pusher, "RETRY_SECONDS_LEFT", math.inf)


async def pushed_in_vain(trainer: ToyTrainer, **script: Any) -> tuple[dict[str, Any], float]:
    """One rank pushes once. How it failed, and how many seconds it took from its join to its end."""
    (rank,) = await trainer.start_ranks(Script(**{"steps": 1, "push_timeout": PUSH_SECONDS} | script), world=1)
    await eventually(lambda: bool(rank.said("joined")), within=120)
    began = time.monotonic()
    assert await rank.code() == 0
    (failure,) = rank.said("failed")
    return failure, time.monotonic() - began


async def aborted(fleet: LocalFleet, engine_id: str) -> engine_pb2.UpdateProgress:
    """The engine's word on its latest update, once it says that it was aborted."""

    async def says_so() -> engine_pb2.UpdateProgress:
        update = (await fleet.status(engine_id)).update
        assert (update.stage, update.error_reason) == (engine_pb2.UPDATE_STAGE_ABORTED, "UPDATE_ABORTED"), str(update)
        return update

    return await eventually(says_so)


# ---- the engine's end fails ---------------------------------------------------------------------


async def test_P4_a_failed_install_reaches_the_caller_in_the_engines_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = lay_hands(monkeypatch)
    words = "worker 3: out of memory while layer 17 was loaded"
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        for engine_id in ("e0", "e1"):
            hands[engine_id].fail("half", InstallFailed(engine_id, "1.1", True, words))
        failure, seconds = await pushed_in_vain(trainer)
    assert failure["reason"] == "UPDATE_FAILED"
    assert "e0 FAILED (INSTALL_FAILED" in failure["text"]
    assert "e1 FAILED (INSTALL_FAILED" in failure["text"]
    assert words in failure["text"]
    assert seconds < PROMPTLY
    assert segments() == []


async def test_P4_an_engine_that_dies_in_its_install_is_named_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it dies by its deadline, or by an error that nobody planned for: its agent knows why."""
    hands = lay_hands(monkeypatch)
    words = "the kernel killed worker 3: out of memory"
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        hands["e0"].fail("half", EngineDied("e0", words))
        failure, seconds = await pushed_in_vain(trainer)
    assert failure["reason"] == "UPDATE_FAILED"
    assert seconds < PROMPTLY
    assert words in failure["text"]


async def test_P4_an_install_that_hangs_ends_the_push_at_the_coordinators_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = lay_hands(monkeypatch)
    async with (
        fleet_for_toys(tmp_path, engines=1, go_limit_seconds=0.5) as fleet,
        toy_trainer(fleet.address) as trainer,
    ):
        stands = hands["e0"].hold("half")
        failure, seconds = await pushed_in_vain(trainer)
        stands.go.set()
    assert failure["reason"] == "UPDATE_FAILED"
    assert "no outcome before the deadline" in failure["text"]
    assert seconds < PROMPTLY


class Mute(weight_update_pb2_grpc.WeightUpdateServicer):
    """An agent that takes all frames, and says no more than that it takes them."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()
        self.over = asyncio.Event()

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[weight_update_pb2.UpdateWeightsRequest], context: Any
    ) -> AsyncIterator[weight_update_pb2.UpdateWeightsResponse]:
        try:
            async for frame in request_iterator:
                if frame.HasField("open"):
                    self.heard.set()
                    accepted = weight_update_pb2.UpdateAccepted(version=frame.open.version, layout_needed=True)
                    yield weight_update_pb2.UpdateWeightsResponse(accepted=accepted)
        finally:
            self.over.set()


async def test_P4_an_engine_that_says_nothing_more_is_named_at_the_pushs_deadline_and_its_stream_ends(
    tmp_path: Path,
) -> None:
    mute = Mute()

    def register(server: Any) -> str:
        weight_update_pb2_grpc.add_WeightUpdateServicer_to_server(mute, server)
        return "weightplane.v1.WeightUpdate"

    server = await start_server("127.0.0.1:0", [register])
    async with (
        fleet_for_toys(tmp_path, engines=0, lease_ttl_seconds=60.0) as fleet,
        toy_trainer(fleet.address) as trainer,
    ):
        session: Any = fleet_pb2_grpc.FleetStub(fleet.channel(fleet.address)).Session()
        await session.write(fleet_pb2.SessionRequest(engine_hello=_hello_of_mute(server.address)))
        await fleet.wait_for_engines(1)
        failure, seconds = await pushed_in_vain(trainer, push_timeout=MUTE_SECONDS)
        assert mute.heard.is_set()
        assert failure["reason"] == "DEADLINE_EXCEEDED"
        assert "mute" in failure["text"]
        assert seconds < MUTE_SECONDS + MARGIN
        await asyncio.wait_for(mute.over.wait(), MARGIN)
        session.cancel()
    await server.stop()


def _hello_of_mute(endpoint: str) -> fleet_pb2.EngineHello:
    status = engine_pb2.EngineStatus(
        engine=version_pb2.EngineRef(engine_id="mute", incarnation="i"),
        run_id=RUN,
        model="policy",
        life=engine_pb2.ENGINE_LIFE_RUNNING,
        weights=engine_pb2.WEIGHTS_STATE_UNSET,
        residency=engine_pb2.RESIDENCY_AWAKE,
    )
    return fleet_pb2.EngineHello(status=status, endpoint=endpoint, host_id="another", device_uuids=["mute-device"])


# ---- the trainer's end fails --------------------------------------------------------------------


def assert_told_or_cut(said: str, words: str) -> None:
    """The engine hears why, unless a chunk was just being written: giving that up ends the stream, which is an abort
    too (INV-3). The coordinator's cause has the words in any case."""
    assert words in said or said == "the stream ended without a commit"


async def test_P4_a_source_that_raises_ends_the_engines_streams_with_its_text(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        failure, seconds = await pushed_in_vain(trainer, spoil="raise")
        assert failure["text"] == "the source broke"
        assert seconds < PROMPTLY
        for engine_id in ("e0", "e1"):
            update = await aborted(fleet, engine_id)
            assert_told_or_cut(update.error_message, "the source broke")
            assert await fleet.applied(engine_id) is None
        (failed,) = (await fleet.view()).updates
        assert failed.phase == fleet_pb2.UPDATE_PHASE_FAILED
        assert "the source broke" in failed.cause


async def test_P4_a_rank_that_is_killed_ends_the_engines_streams_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank.between_chunks").write_text("kill after=3")
    monkeypatch.setenv(failpoints.DIRECTORY_VARIABLE, str(tmp_path))
    async with fleet_for_toys(tmp_path / "fleet", engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        (rank,) = await trainer.start_ranks(Script(steps=1), world=1)
        assert await rank.code() < 0
        died = time.monotonic()
        update = await aborted(fleet, "e0")
        assert time.monotonic() - died < PROMPTLY
        assert_told_or_cut(update.error_message, "rank 0")
        assert await fleet.applied("e0") is None
        (failed,) = (await fleet.view()).updates
        assert failed.phase == fleet_pb2.UPDATE_PHASE_FAILED
        assert "rank 0" in failed.cause


# ---- words on their way -------------------------------------------------------------------------


async def test_P4_a_refusal_that_meets_a_chunk_on_its_way_reaches_the_trainer_in_the_engines_words() -> None:
    """The trainer agent's own stream, which goes on writing while the engine refuses an earlier chunk.

    grpcio loses most of such refusals (grpc/grpc#36066); the next attempt hears it.
    """
    words = ChecksumMismatch(name="layer.17", expected="aa", got="bb")
    for _ in range(4):
        async with attempt(FakeAgent(*[refusing(words, "chunk")] * 40)) as running:
            for index in range(64):
                running.chunks.add(_small_chunk(index))
            end = await running.end()
            assert str(end.error) == str(words)
            assert end.memory_free


def _small_chunk(index: int) -> rank_pb2.SendChunk:
    place = layout_pb2.SharedMemoryRange(segment="weightplane-s", host_id="h", offset=0, byte_count=64)
    return rank_pb2.SendChunk(index=index, buffers=[layout_pb2.BufferHandle(shared_memory=place)])

"""Streaming updates over real gRPC, with in-memory engines: installed as they come, and cut in every place."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from controlplane import failpoints
from controlplane.rpc.errors import from_rpc_error
from engine_agent.memory.engine import token_of, weights_of
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet, local_fleet
from tests.support.writer import LAYOUT, Stream, Weights
from weightplane.v1 import engine_pb2, fleet_pb2, weight_update_pb2

STREAMING = weight_update_pb2.APPLY_STREAMING
POISONED = engine_pb2.WEIGHTS_STATE_POISONED


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with local_fleet(tmp_path, engines=1, apply="streaming", seconds_per_token=0.002) as running:
        yield running


class Streaming:
    """One streaming update to the one engine, frame by frame."""

    def __init__(self, fleet: LocalFleet, begun: fleet_pb2.BeginUpdateResponse) -> None:
        self.fleet, self.begun, self.weights = fleet, begun, Weights()
        self.stream: Stream = fleet.stream(begun, "e0", apply=STREAMING)

    async def ready(self) -> None:
        """Up to go, before any byte."""
        if (await self.stream.open()).layout_needed:
            await self.stream.layout()
        assert (await self.stream.read()).WhichOneof("frame") == "ready"
        await self.fleet.go(self.begun.update_id)

    async def part(self, tensor: int) -> None:
        """One chunk; returns when it is released."""
        await self.stream.chunk(self.weights, tensor, [tensor])
        frame = await self.stream.read()
        assert (frame.WhichOneof("frame"), frame.chunk_released.index) == ("chunk_released", tensor)

    async def commit(self) -> fleet_pb2.UpdateState:
        await self.stream.commit(self.weights)
        assert (await self.stream.read()).WhichOneof("frame") == "applied"
        return await self.fleet.decided(self.begun.update_id)

    async def reason(self) -> str:
        """Of the error that ends the stream."""

        async def read_on() -> None:
            while True:
                await self.stream.read()

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_on()
        return from_rpc_error(error.value).reason


async def begin(fleet: LocalFleet) -> Streaming:
    return Streaming(fleet, await fleet.begin())


async def push(fleet: LocalFleet) -> Streaming:
    streaming = await begin(fleet)
    await streaming.ready()
    await streaming.part(0)
    await streaming.part(1)
    state = await streaming.commit()
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    return streaming


async def weights_state(fleet: LocalFleet) -> int:
    return (await fleet.status("e0")).weights


async def poisoned(fleet: LocalFleet) -> bool:
    return await weights_state(fleet) == POISONED


async def test_streaming_pushes_are_served_with_their_versions(fleet: LocalFleet) -> None:
    for number in (1, 2):
        weights = (await push(fleet)).weights
        digests = {t.name: hashlib.sha256(p).digest() for t, p in zip(LAYOUT.tensors, weights.parts, strict=True)}
        expected = [token_of(weights_of(digests), [1, 2, 3], i, 256) for i in range(5)]
        tokens, spans, _ = await fleet.generate("e0", 5)
        assert (tokens, spans) == (expected, [(number, 0, 5)])


async def test_inv1_unset_after_the_first_chunk_and_served_until_then(fleet: LocalFleet) -> None:
    await push(fleet)
    streaming = await begin(fleet)
    await streaming.ready()
    assert await fleet.applied("e0") == 1
    assert (await fleet.generate("e0", 3))[1] == [(1, 0, 3)]
    await streaming.part(0)
    assert await fleet.applied("e0") is None
    await streaming.part(1)
    assert await fleet.applied("e0") is None
    await streaming.commit()
    assert await fleet.applied("e0") == 2


@pytest.mark.parametrize("how", ["end", "cut", "silence"])
@pytest.mark.parametrize("parts", [1, 2])
async def test_inv3_inv4_an_end_without_a_commit_after_the_first_byte_is_poison_and_the_next_push_heals(
    fleet: LocalFleet, how: str, parts: int
) -> None:
    await push(fleet)
    streaming = await begin(fleet)
    await streaming.ready()
    for tensor in range(parts):
        await streaming.part(tensor)
    if how == "end":
        await streaming.stream.end()
    elif how == "cut":
        streaming.stream.cut()
    await eventually(lambda: poisoned(fleet))
    state = await fleet.decided(streaming.begun.update_id)
    assert state.phase == fleet_pb2.UPDATE_PHASE_FAILED
    await push(fleet)
    assert (await fleet.generate("e0", 3))[1] == [(3, 0, 3)]


@pytest.mark.parametrize("how", ["end", "cut"])
async def test_inv4_an_end_before_the_first_byte_leaves_the_old_version_serving(fleet: LocalFleet, how: str) -> None:
    await push(fleet)
    streaming = await begin(fleet)
    await streaming.ready()
    if how == "end":
        await streaming.stream.end()
    else:
        streaming.stream.cut()
    await fleet.decided(streaming.begun.update_id)
    assert (await fleet.generate("e0", 3))[1] == [(1, 0, 3)]


async def test_inv4_a_first_chunk_with_wrong_bytes_is_refused_before_anything_stands_still(fleet: LocalFleet) -> None:
    await push(fleet)
    streaming = await begin(fleet)
    await streaming.ready()
    checksums = [b"\0" * 8, b"\0" * 8]
    streaming.weights = type("Wrong", (Weights,), {"checksums": checksums})()
    await streaming.stream.chunk(streaming.weights, 0, [0])
    assert await streaming.reason() == "CHECKSUM_MISMATCH"
    assert (await fleet.generate("e0", 3))[1] == [(1, 0, 3)]


async def test_inv3_a_commit_that_does_not_state_what_came_is_refused_and_poisons(fleet: LocalFleet) -> None:
    streaming = await begin(fleet)
    await streaming.ready()
    await streaming.part(0)
    await streaming.part(1)
    await streaming.stream.commit(streaming.weights, byte_count=LAYOUT.byte_count - 1)
    assert await streaming.reason() == "BYTE_COUNT_MISMATCH"
    await eventually(lambda: poisoned(fleet))


async def test_inv4_a_worker_that_fails_in_a_later_part_poisons(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await push(fleet)
    streaming = await begin(fleet)
    await streaming.ready()
    monkeypatch.setenv(failpoints.DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "worker.install").write_text("raise after=1")
    await streaming.part(0)
    await streaming.stream.chunk(streaming.weights, 1, [1])
    assert await streaming.reason() == "INSTALL_FAILED"
    assert await poisoned(fleet)
    await push(fleet)
    assert await fleet.applied("e0") == 3


async def test_inv7_a_takeover_ends_a_streaming_install_and_its_first_push_heals(fleet: LocalFleet) -> None:
    await push(fleet)
    streaming = await begin(fleet)
    await streaming.ready()
    await streaming.part(0)
    await fleet.take_lease(takeover=True, trainer_id="other")
    assert await streaming.reason() == "STALE_TERM"
    await eventually(lambda: poisoned(fleet))
    await fleet.decided(streaming.begun.update_id)
    await push(fleet)
    assert (await fleet.generate("e0", 2))[2] == "FINISH_REASON_LENGTH"


async def test_inv6_the_writer_may_go_once_its_commit_was_taken(fleet: LocalFleet) -> None:
    streaming = await begin(fleet)
    await streaming.ready()
    await streaming.part(0)
    await streaming.part(1)
    await streaming.stream.commit(streaming.weights)
    await streaming.stream.end()
    state = await fleet.decided(streaming.begun.update_id)
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED


async def test_an_engine_that_was_not_asked_to_stream_refuses(tmp_path: Path) -> None:
    async with local_fleet(tmp_path, engines=1) as fleet:
        stream = fleet.stream(await fleet.begin(), "e0", apply=STREAMING)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.open()
        assert from_rpc_error(error.value).reason == "UNSUPPORTED_BY_ENGINE"


async def test_a_streaming_engine_still_takes_staged_updates(fleet: LocalFleet) -> None:
    await push(fleet)
    state = await fleet.push(Weights())
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    assert await fleet.applied("e0") == 2

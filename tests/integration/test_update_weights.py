"""The version-with-data contract over real gRPC, with in-memory engines: streams cut, doubled, late and wrong."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from controlplane import failpoints
from controlplane.rpc.errors import from_rpc_error
from engine_agent.memory.engine import token_of, weights_of
from engine_agent.services.releases import MAX_HELD
from tests.cases.engines import Hands, lay_hands
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet, local_fleet
from tests.support.ports import free_port
from tests.support.refusals import ended_by
from tests.support.writer import LAYOUT, Weights
from weightplane.v1 import engine_pb2, fleet_pb2, version_pb2, weight_update_pb2


@pytest.fixture
async def fleet(tmp_path: Path, hands: Hands) -> AsyncIterator[LocalFleet]:
    async with local_fleet(tmp_path, seconds_per_token=0.002) as running:
        yield running


async def test_three_pushes_reach_both_engines_with_their_versions(fleet: LocalFleet) -> None:
    for step in (1, 2, 3):
        weights = Weights()
        state = await fleet.push(weights, step=step)
        assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
        digests = {t.name: hashlib.sha256(p).digest() for t, p in zip(LAYOUT.tensors, weights.parts, strict=True)}
        expected = [token_of(weights_of(digests), [1, 2, 3], i, 256) for i in range(5)]
        for engine_id in ("e0", "e1"):
            tokens, spans, _ = await fleet.generate(engine_id, 5, min_version=state.version)
            assert tokens == expected
            assert spans == [(step, 0, 5)]


async def test_v3_asked_between_any_two_frames_the_engine_says_what_it_holds(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    weights, begun = Weights(), await fleet.begin()
    stream = fleet.stream(begun, "e0")
    await stream.open()
    assert await fleet.applied("e0") == 1
    await stream.chunk(weights, 0, [0])
    assert await fleet.applied("e0") == 1
    await stream.chunk(weights, 1, [1])
    while (await stream.read()).WhichOneof("frame") != "ready":
        assert await fleet.applied("e0") == 1
    assert await fleet.applied("e0") == 1


@pytest.mark.parametrize("how", ["end", "cut"])
async def test_inv3_a_stream_that_ends_without_a_commit_is_an_abort(fleet: LocalFleet, how: str) -> None:
    await fleet.push(Weights())
    begun = await fleet.begin()
    stream = fleet.stream(begun, "e0")
    await stream.until_ready(Weights())
    if how == "end":
        await stream.end()
    else:
        stream.cut()
    state = await fleet.decided(begun.update_id)
    assert state.phase == fleet_pb2.UPDATE_PHASE_FAILED
    assert await fleet.applied("e0") == 1
    assert (await fleet.generate("e0", 3))[1] == [(1, 0, 3)]


async def test_silence_on_an_open_stream_is_an_abort(tmp_path: Path) -> None:
    async with local_fleet(tmp_path, engines=1, stream_idle_seconds=0.5) as fleet:
        stream = fleet.stream(await fleet.begin(), "e0")
        await stream.open()
        assert await ended_by(stream) == "UPDATE_ABORTED"


async def test_inv4_after_the_commit_frame_the_agent_owns_the_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = lay_hands(monkeypatch)
    held = [hands[e].hold("half") for e in ("e0", "e1")]
    async with local_fleet(tmp_path) as fleet:
        weights, begun = Weights(), await fleet.begin()
        streams = [fleet.stream(begun, e) for e in ("e0", "e1")]
        for stream in streams:
            await stream.until_ready(weights)
        await fleet.go(begun.update_id)
        for stream in streams:
            await stream.commit(weights)

        for engine in held:
            await engine.reached.wait()
        assert [(await fleet.status(e)).word for e in ("e0", "e1")] == ["installing"] * 2
        assert await fleet.applied("e0") is None  # INV-1
        for stream in streams:
            stream.cut()
        for engine in held:
            engine.go.set()
        state = await fleet.decided(begun.update_id)
        assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
        assert [await fleet.applied(e) for e in ("e0", "e1")] == [1, 1]


async def test_inv6_the_same_update_again_after_its_commit_gets_its_outcome(fleet: LocalFleet) -> None:
    weights, begun = Weights(), await fleet.begin()
    streams = [fleet.stream(begun, e) for e in ("e0", "e1")]
    for stream in streams:
        await stream.until_ready(weights)
    await fleet.go(begun.update_id)
    for stream in streams:
        await stream.commit(weights)
    await fleet.decided(begun.update_id)
    again = fleet.stream(begun, "e0")
    assert (await again.open()).attached
    applied = (await again.read()).applied
    assert (applied.version.number, applied.content_digest) == (1, weights.digest)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"run_id": "other"}, "WRONG_RUN"),
        ({"model": "teacher"}, "WRONG_MODEL"),
        ({"engine": version_pb2.EngineRef(engine_id="e0", incarnation="old")}, "WRONG_INCARNATION"),
        ({"writer_term": 0}, "INVALID_MESSAGE"),
        ({"transport": weight_update_pb2.TRANSPORT_CUDA_IPC}, "UNSUPPORTED_BY_ENGINE"),
        ({"transport": weight_update_pb2.TRANSPORT_BROADCAST}, "INVALID_MESSAGE"),  # without a link
        (
            {"manifest": weight_update_pb2.Manifest(layout_digest=b"x" * 32, tensor_count=2, byte_count=4060)},
            "LAYOUT_UNKNOWN",
        ),
    ],
)
async def test_an_open_frame_that_is_wrong_is_refused_before_anything_is_touched(
    fleet: LocalFleet, changed: dict[str, object], reason: str
) -> None:
    await fleet.push(Weights())
    stream = fleet.stream(await fleet.begin(), "e0", **changed)
    await stream.send(open=stream._opened)
    if reason == "LAYOUT_UNKNOWN":
        await stream.layout()
    assert await ended_by(stream) == reason
    assert await fleet.applied("e0") == 1


async def test_m3_bytes_that_are_not_what_the_sender_said_are_refused(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    stream = fleet.stream(await fleet.begin(), "e0")
    await stream.open()
    wrong = Weights()
    honest = wrong.checksums
    wrong.parts[0] = bytes(len(wrong.parts[0]))
    records = [
        weight_update_pb2.TensorRecord(
            tensor=0, tensor_offset=0, buffer_offset=0, byte_count=len(wrong.parts[0]), checksum=honest[0]
        )
    ]
    await stream.send(
        chunk=weight_update_pb2.Chunk(
            version=stream.version,
            index=0,
            records=records,
            buffers=[{"inline": wrong.parts[0]}],  # type: ignore[list-item]
        )
    )
    assert await ended_by(stream) == "CHECKSUM_MISMATCH"
    assert await fleet.applied("e0") == 1


async def test_v5_a_commit_that_states_other_counts_is_refused(fleet: LocalFleet) -> None:
    weights = Weights()
    stream = fleet.stream(await fleet.begin(), "e0")
    await stream.until_ready(weights)
    await stream.commit(weights, chunk_count=3)
    assert await ended_by(stream) == "BYTE_COUNT_MISMATCH"


async def test_inv7_a_zombie_is_refused_by_coordinator_and_agent(fleet: LocalFleet) -> None:
    weights, begun = Weights(), await fleet.begin()
    old_term, stream = fleet.term, fleet.stream(begun, "e0")
    await stream.until_ready(weights)
    await fleet.take_lease(takeover=True, trainer_id="successor")
    assert await ended_by(stream) == "STALE_TERM"
    assert (await fleet.decided(begun.update_id)).phase == fleet_pb2.UPDATE_PHASE_FAILED
    direct = fleet.stream(begun, "e0", writer_term=old_term)
    await direct.send(open=direct._opened)
    assert await ended_by(direct) == "STALE_TERM"
    assert (await fleet.push(Weights())).phase == fleet_pb2.UPDATE_PHASE_COMMITTED


async def test_p1_a_failure_inside_an_install_poisons_that_engine_and_the_next_push_heals_it(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.push(Weights())
    monkeypatch.setenv(failpoints.DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "worker.install").write_text("raise after=1")
    state = await fleet.push(Weights())
    assert state.phase == fleet_pb2.UPDATE_PHASE_DEGRADED
    failed = [o.engine.engine_id for o in state.engines if o.stage == engine_pb2.UPDATE_STAGE_FAILED]
    assert len(failed) == 1
    status = await fleet.status(failed[0])
    assert (status.word, status.gate_open, status.HasField("applied")) == ("poisoned", False, False)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await fleet.generate(failed[0], 3)
    assert from_rpc_error(error.value).reason == "ENGINE_POISONED"
    (other,) = {"e0", "e1"} - set(failed)
    assert (await fleet.generate(other, 3))[1] == [(2, 0, 3)]
    assert (await fleet.push(Weights())).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    assert (await fleet.generate(failed[0], 3))[1] == [(3, 0, 3)]


async def test_l1_l2_a_replacement_is_unset_and_unrouted_until_the_next_push(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    before = await fleet.engine("e0")
    await fleet.stop("e0")
    fleet.start_engine("e0")

    async def is_back() -> bool:
        found = [e for e in (await fleet.view()).engines if e.status.engine.engine_id == "e0"]
        return bool(found) and found[0].known

    await eventually(is_back)
    after = await fleet.engine("e0")
    assert after.status.engine.incarnation != before.status.engine.incarnation
    assert (after.status.word, after.routable) == ("empty", False)
    await fleet.push(Weights())
    assert await fleet.applied("e0") == 2


async def test_a_lost_coordinator_shuts_no_gate_and_a_new_one_goes_on(fleet: LocalFleet) -> None:
    await fleet.stop("coordinator")
    await fleet.start_coordinator(lease_ttl_seconds=60.0)  # no engine is silent for so long, whatever else runs here
    await fleet.wait_for_engines(2)
    await fleet.take_lease(takeover=True)
    await fleet.push(Weights())
    endpoint_before = (await fleet.engine("e0")).endpoint
    sample = await fleet.sample_in("e0", 800)
    await fleet.stop("coordinator")
    await fleet.start_coordinator()
    assert (await sample)[1] == [(1, 0, 800)]
    await fleet.wait_for_engines(2)
    view = await fleet.view()
    assert (view.coordinator_term, [v.number for v in view.state.models[0].served]) == (3, [1])
    assert (await fleet.engine("e0")).endpoint == endpoint_before
    await fleet.take_lease(takeover=True)
    state = await fleet.push(Weights())
    assert (state.phase, state.version.number) == (fleet_pb2.UPDATE_PHASE_COMMITTED, 2)


async def test_inv12_inline_chunks_are_released_as_they_are_copied(fleet: LocalFleet) -> None:
    weights = Weights()
    stream = fleet.stream(await fleet.begin(), "e0")
    await stream.open()
    await stream.layout()
    for index in (0, 1):
        await stream.chunk(weights, index, [index])
        assert (await stream.read()).chunk_released.index == index
    assert (await stream.read()).WhichOneof("frame") == "ready"


async def test_inv12_while_frames_keep_coming_one_release_speaks_for_many_of_them(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_agent.services.update_attempt.HELD_SECONDS", 20.0)  # however slowly they come here
    weights = Weights()
    stream = fleet.stream(await fleet.begin(), "e0")
    await stream.open()
    await stream.layout()
    for index in range(2 * MAX_HELD):
        await stream.chunk(weights, index, [])
    assert [(await stream.read()).chunk_released.index for _ in range(2)] == [MAX_HELD - 1, 2 * MAX_HELD - 1]
    await stream.chunk(weights, 2 * MAX_HELD, [0])
    await stream.chunk(weights, 2 * MAX_HELD + 1, [1])
    assert (await stream.read()).chunk_released.index == 2 * MAX_HELD + 1
    assert (await stream.read()).WhichOneof("frame") == "ready"


async def test_the_report_says_how_many_tensors_changed(tmp_path: Path) -> None:
    async with local_fleet(tmp_path, engines=1) as fleet:
        weights, counts = Weights(), []
        for part in (None, 0, None):
            if part is not None:
                weights.parts[part] = bytes(len(weights.parts[part]))
            begun = await fleet.begin()
            stream = fleet.stream(begun, "e0")
            await stream.until_ready(weights)
            await fleet.go(begun.update_id)
            await stream.commit(weights)
            applied = (await stream.read()).applied
            counts.append(applied.changed_tensors if applied.HasField("changed_tensors") else None)
            await fleet.decided(begun.update_id)
    assert counts == [None, 1, 0]


async def test_metrics_name_what_is_served_and_what_was_refused(tmp_path: Path) -> None:
    port = free_port()
    fleet = LocalFleet(tmp_path)
    try:
        await fleet.start_coordinator(metrics_listen=f"127.0.0.1:{port}")
        fleet.start_engine("e0")
        await fleet.wait_for_engines(1)
        await fleet.take_lease()
        await fleet.push(Weights())
        with pytest.raises(grpc.aio.AioRpcError):
            await fleet.decided("no-such-update")
        wanted = (
            'weightplane_model_served_number{model="policy"} 1.0',
            'weightplane_engine_applied_number{engine="e0"} 1.0',
            'reason="UNKNOWN_UPDATE"} 1.0',
        )

        async def all_there() -> bool:
            url = f"http://127.0.0.1:{port}/metrics"
            text = await asyncio.to_thread(lambda: urlopen(url, timeout=60).read().decode())
            return all(line in text for line in wanted)

        await eventually(all_there)
    finally:
        await fleet.close()

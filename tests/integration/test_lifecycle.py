"""weightplane.v1.Lifecycle over real gRPC: sleep, draining and holds, asked for at the wrong time and by others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.core.errors import EngineDied
from controlplane.core.versions import Term, WeightVersion
from controlplane.rpc.errors import from_rpc_error
from engine_agent.daemon.agent import RESTART_WAIT_SECONDS
from engine_agent.memory.engine import MemoryEngine
from tests.cases.engines import lay_hands
from tests.support.checkpoint_fleet import (
    Person,
    checkpoint_fleet,
    open_directly,
    routable,
    start_engine,
    words_of,
)
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.refusals import reason_of
from tests.support.writer import LAYOUT, Weights
from weightplane.v1 import engine_pb2, fleet_pb2, version_pb2, weight_update_pb2


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with checkpoint_fleet(tmp_path, 1, {"seconds_per_token": 0.002, "sleep_seconds": 0.2}) as running:
        yield running


async def open_reason(fleet: LocalFleet, **changed: Any) -> str:
    stream = await open_directly(fleet, "e0", WeightVersion(9, Term(fleet.term)), **changed)
    return await reason_of(stream.open())


# ---- sleep --------------------------------------------------------------------------------------


async def test_a_stranger_wakes_nobody(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    me, stranger = Person(fleet, "e0"), Person(fleet, "e0", "stranger")
    await me.sleep()
    assert await reason_of(stranger.wake()) == "DEVICES_TAKEN"
    assert (await stranger.resume()).residency == engine_pb2.RESIDENCY_ASLEEP
    assert (await fleet.status("e0")).word == "asleep"


async def test_sleep_and_waking_are_idempotent(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    me = Person(fleet, "e0")
    assert [(await me.sleep()).word for _ in range(2)] == ["asleep", "asleep"]
    assert [(await me.wake()).residency for _ in range(2)] == [engine_pb2.RESIDENCY_AWAKE] * 2
    assert (await fleet.generate("e0", 3))[1] == [(1, 0, 3)]


async def test_a_call_that_is_given_up_in_the_middle_of_sleep_leaves_it_asleep_or_awake_and_nothing_between(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, begun, go, sleep = Weights(), asyncio.Event(), asyncio.Event(), MemoryEngine.sleep

    async def when_let(engine: MemoryEngine, level: int) -> None:
        begun.set()
        await go.wait()
        await sleep(engine, level)

    monkeypatch.setattr(MemoryEngine, "sleep", when_let)
    await fleet.push(weights)
    me = Person(fleet, "e0")
    sample = await fleet.sample_in("e0", 200)
    sleeping = asyncio.create_task(me.sleep())
    await eventually(begun.is_set)
    sleeping.cancel()
    assert (await fleet.status("e0")).word == "asleep"
    go.set()
    assert (await fleet.status("e0")).word == "asleep"
    assert await open_reason(fleet) == "ENGINE_ASLEEP"
    await me.sleep()
    await me.wake()
    tokens, spans, _ = await sample
    assert (tokens[:4], spans) == (words_of(weights), [(1, 0, 200)])


async def _is_unrouted(fleet: LocalFleet) -> bool:
    return not (await fleet.engine("e0")).routable


async def _lives(fleet: LocalFleet, count: int) -> bool:
    return (await fleet.status("e0")).live_requests == count


async def test_an_engine_that_cannot_sleep_says_so_and_serves_on(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path, 1, {"can_sleep": False}) as fleet:
        await fleet.push(Weights())
        assert await reason_of(Person(fleet, "e0").sleep()) == "UNSUPPORTED_BY_ENGINE"
        assert (await fleet.generate("e0", 3))[1] == [(1, 0, 3)]


async def test_words_for_another_life_change_nothing(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    me = Person(fleet, "e0")
    await me.pause()
    me.engine = version_pb2.EngineRef(engine_id="e0", incarnation="an-older-one")
    for call in (me.sleep(), me.wake(), me.drain(), me.pause(), me.resume()):
        assert await reason_of(call) == "WRONG_INCARNATION"
    status = await fleet.status("e0")
    assert (status.word, status.gate_open, status.residency) == ("held", False, engine_pb2.RESIDENCY_AWAKE)


async def test_in_mid_install_neither_a_resume_nor_waking_opens_the_gate_and_sleep_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = lay_hands(monkeypatch)["e0"]
    async with checkpoint_fleet(tmp_path, 1) as fleet:
        await fleet.push(Weights())
        me = Person(fleet, "e0")
        await me.pause()
        held = hand.hold("half")
        push = asyncio.create_task(fleet.push(Weights()))
        await held.reached.wait()  # its weights are a mixture
        resumed, woken, slept = [await reason_or_status(call) for call in (me.resume(), me.wake(), me.sleep())]
        for status in (resumed, woken):
            assert isinstance(status, engine_pb2.EngineStatus)
            assert (status.word, status.gate_open, status.HasField("applied")) == ("installing", False, False)
        assert slept == "UPDATE_IN_PROGRESS"
        held.go.set()
        assert (await push).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
        assert (await fleet.generate("e0", 3))[1] == [(2, 0, 3)]


async def reason_or_status(call: Awaitable[engine_pb2.EngineStatus]) -> engine_pb2.EngineStatus | str:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason


async def test_an_engine_that_dies_asleep_is_not_started_on_devices_that_its_owner_still_has(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.push(Weights())
    me, stranger = Person(fleet, "e0"), Person(fleet, "e0", "stranger")
    await me.sleep()
    before = (await fleet.status("e0")).engine
    me.engine = stranger.engine = before
    with monkeypatch.context() as patch:
        patch.setattr(MemoryEngine, "probe", _dies)

        async def dead() -> bool:
            return (await fleet.status("e0")).word == "dead"

        await eventually(dead)
    assert await reason_of(stranger.wake()) == "ENGINE_NOT_READY"
    await asyncio.sleep(2 * RESTART_WAIT_SECONDS[0])
    assert (await fleet.status("e0")).engine == before
    assert await reason_of(me.wake()) == "ENGINE_NOT_READY"  # it takes them: again soon, by its new name

    async def fresh() -> bool:
        view = await fleet.engine("e0")
        return view.known and view.status.word == "empty" and view.status.engine != before

    await eventually(fresh)


async def _dies(self: MemoryEngine) -> None:
    raise EngineDied(engine_id="e0", cause="signal 9")


# ---- draining -----------------------------------------------------------------------------------


async def test_a_draining_engine_takes_nothing_new_ends_what_it_has_and_comes_back(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    me = Person(fleet, "e0")
    inside = await fleet.sample_in("e0", 300)
    draining = await me.drain()
    assert (draining.word, draining.gate_open) == ("draining", False)
    assert await reason_of(fleet.generate("e0", 3)) == "ENGINE_DRAINING"
    assert await open_reason(fleet) == "ENGINE_DRAINING"
    await eventually(lambda: _is_unrouted(fleet))
    assert await reason_of(fleet.begin()) == "NO_ENGINES"
    assert (await inside)[1] == [(1, 0, 300)]
    await eventually(lambda: _lives(fleet, 0))
    assert (await Person(fleet, "e0", "stranger").resume()).word == "draining"
    await me.resume()
    await routable(fleet, "e0", 1)
    assert (await fleet.generate("e0", 3))[1] == [(1, 0, 3)]
    assert (await fleet.push(Weights())).phase == fleet_pb2.UPDATE_PHASE_COMMITTED


async def test_draining_ends_an_update_that_did_not_commit_and_who_waits_outside(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    await Person(fleet, "e0", "operator").pause()
    waiting = asyncio.create_task(fleet.generate("e0", 3, wait=60))
    begun = await fleet.begin()
    stream = fleet.stream(begun, "e0")
    await stream.until_ready(Weights())
    await Person(fleet, "e0").drain()
    assert await reason_of(stream.read()) == "ENGINE_DRAINING"
    assert await reason_of(waiting) == "ENGINE_DRAINING"
    assert await fleet.applied("e0") == 1


# ---- deltas -------------------------------------------------------------------------------------


def _delta(number: int, digest: bytes) -> dict[str, Any]:
    base = weight_update_pb2.Base(version=version_pb2.WeightVersion(term=1, number=number), content_digest=digest)
    manifest = weight_update_pb2.Manifest(
        layout_digest=LAYOUT.digest, tensor_count=len(LAYOUT.tensors), byte_count=LAYOUT.byte_count, base=base
    )
    return {"manifest": manifest}


async def test_inv5_a_delta_for_other_weights_than_it_holds_is_refused(fleet: LocalFleet) -> None:
    weights = Weights()
    assert await open_reason(fleet, **_delta(1, weights.digest)) == "BASE_MISMATCH"  # it holds nothing
    await fleet.push(weights)
    assert await open_reason(fleet, **_delta(0, weights.digest)) == "BASE_MISMATCH"
    assert await open_reason(fleet, **_delta(1, Weights().digest)) == "BASE_MISMATCH"
    assert await open_reason(fleet, **_delta(1, weights.digest)) == "UNSUPPORTED_BY_ENGINE"
    assert (await fleet.generate("e0", 4))[:2] == (words_of(weights), [(1, 0, 4)])


# ---- who it is ----------------------------------------------------------------------------------


async def test_the_hello_says_group_and_unit(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path, 0) as fleet:
        for engine_id in ("prefill", "decode"):
            start_engine(fleet, engine_id, group="fast", unit="pair", unit_size=2)
        await fleet.wait_for_engines(2)
        view = await fleet.engine("decode")
        assert (view.group, view.unit) == ("fast", "pair")
        await fleet.push(Weights())
        await routable(fleet, "decode", 1)
        await Person(fleet, "prefill").pause()

        async def neither() -> bool:
            return not any(e.routable for e in (await fleet.view()).engines)

        await eventually(neither)


async def test_l2_the_hello_says_which_life_it_is_so_that_an_earlier_ones_comes_too_late(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path, 1) as fleet:
        earlier = (await fleet.engine("e0")).status
        await fleet.stop("e0")
        start_engine(fleet, "e0")
        await fleet.wait_for_engines(1)
        hello = fleet_pb2.EngineHello(
            status=earlier, endpoint="127.0.0.1:1", host_id="h", device_uuids=["MEM-0"], incarnation_number=1
        )
        session: Any = fleet.fleet.Session()
        await session.write(fleet_pb2.SessionRequest(engine_hello=hello))
        assert await reason_of(session.read()) == "WRONG_INCARNATION"
        assert (await fleet.engine("e0")).known

"""P2: an update to a sleeping engine is refused before anything is touched; vLLM on a GPU would segfault."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from controlplane.core.versions import Term, WeightVersion
from controlplane.rpc.errors import from_rpc_error
from tests.support.checkpoint_fleet import Person, open_directly, routable, words_of
from tests.support.local_fleet import LocalFleet, local_fleet
from tests.support.refusals import reason_of
from tests.support.writer import Weights
from weightplane.v1 import engine_pb2, fleet_pb2, weight_update_pb2


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with local_fleet(tmp_path) as running:
        yield running


async def test_P2_an_update_to_a_sleeping_engine_is_refused_and_it_serves_its_old_version_when_it_wakes(
    fleet: LocalFleet,
) -> None:
    weights = Weights()
    await fleet.push(weights)
    me = Person(fleet, "e0")
    asleep = await me.sleep()
    assert (asleep.word, asleep.residency, asleep.gate_open) == ("asleep", engine_pb2.RESIDENCY_ASLEEP, False)
    newer = WeightVersion(2, Term(fleet.term))
    for transport in (weight_update_pb2.TRANSPORT_INLINE, weight_update_pb2.TRANSPORT_SHARED_MEMORY):
        assert await reason_of((await open_directly(fleet, "e0", newer, transport=transport)).open()) == "ENGINE_ASLEEP"
    weights_only = await me.wake(kv_cache=False)
    assert (weights_only.word, weights_only.residency) == ("asleep", engine_pb2.RESIDENCY_WEIGHTS)
    assert await reason_of((await open_directly(fleet, "e0", newer)).open()) == "ENGINE_ASLEEP"
    status = await fleet.status("e0")
    assert (status.applied.number, status.refused.version.number, status.refused.reason) == (1, 2, "ENGINE_ASLEEP")
    await me.wake()
    await routable(fleet, "e0", 1)
    tokens, spans, _ = await fleet.generate("e0", 4)
    assert (tokens, spans) == (words_of(weights), [(1, 0, 4)])


async def test_P2_after_level_2_the_engine_is_unset_when_it_wakes_and_takes_a_full_update(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    me = Person(fleet, "e0")
    asleep = await me.sleep(level=2)
    assert (asleep.weights, asleep.HasField("applied")) == (engine_pb2.WEIGHTS_STATE_UNSET, False)
    assert (
        await reason_of((await open_directly(fleet, "e0", WeightVersion(2, Term(fleet.term)))).open())
        == "ENGINE_ASLEEP"
    )
    awake = await me.wake()
    assert (awake.word, awake.gate_open, awake.HasField("applied")) == ("empty", False, False)
    weights = Weights()
    assert (await fleet.push(weights)).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    assert (await fleet.generate("e0", 4))[:2] == (words_of(weights), [(2, 0, 4)])


async def test_P2_the_fleet_goes_on_without_a_sleeper_which_comes_back_with_the_next_push(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    me = Person(fleet, "e0")
    await me.sleep()
    state = await fleet.push(Weights())
    assert [o.engine.engine_id for o in state.engines] == ["e1"]
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    awake = await me.wake()
    assert (awake.applied.number, awake.word, awake.gate_open) == (1, "ready", False)
    weights = Weights()
    await fleet.push(weights)
    assert (await fleet.generate("e0", 4))[:2] == (words_of(weights), [(3, 0, 4)])


async def test_P2_sleep_while_bytes_arrive_ends_that_update_and_harms_nothing(fleet: LocalFleet) -> None:
    weights = Weights()
    await fleet.push(weights)
    begun = await fleet.begin()
    stream = fleet.stream(begun, "e0")
    await stream.open()
    await stream.chunk(Weights(), 0, [0])
    assert (await stream.read()).WhichOneof("frame") == "chunk_released"
    await Person(fleet, "e0").sleep()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stream.read()
    assert from_rpc_error(error.value).reason == "ENGINE_ASLEEP"
    state = await fleet.decided(begun.update_id)
    (outcome,) = [o for o in state.engines if o.engine.engine_id == "e0"]
    assert (state.phase, outcome.error_reason) == (fleet_pb2.UPDATE_PHASE_FAILED, "ENGINE_ASLEEP")
    await Person(fleet, "e0").wake()
    assert (await fleet.generate("e0", 4))[:2] == (words_of(weights), [(1, 0, 4)])

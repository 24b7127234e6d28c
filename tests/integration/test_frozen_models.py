"""Frozen models (teacher, reference): served from the start as number 0, by content, and never updated."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash

from controlplane.core.layout import content_digest
from controlplane.core.versions import FROZEN, Term, WeightVersion
from controlplane.exit_codes import ExitCode
from controlplane.rpc.errors import from_rpc_error
from engine_agent.memory.engine import MemorySettings, initial_tensors, token_of, weights_of
from tests.support.checkpoint_fleet import Person, open_directly, routable, start_engine
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.writer import SHAPES
from weightplane.v1 import engine_pb2, fleet_pb2


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[LocalFleet]:
    """A coordinator, and nothing else yet."""
    fleet = LocalFleet(tmp_path)
    await fleet.start_coordinator()
    yield fleet
    await fleet.close()


def loaded(seed: int = 0) -> dict[str, bytes]:
    return initial_tensors(MemorySettings(tensors=SHAPES, seed=seed))


async def model_state(fleet: LocalFleet) -> fleet_pb2.ModelState:
    return next(m for m in (await fleet.view()).state.models if m.model == "policy")


async def test_its_engine_serves_what_it_loaded_at_once_as_number_0(fleet: LocalFleet) -> None:
    start_engine(fleet, "e0", {"seed": 1}, initial="serve")
    await fleet.wait_for_engines(1)
    await routable(fleet, "e0", 0)
    status = await fleet.status("e0")
    tensors = loaded(1)
    assert status.content_digest == content_digest([xxhash.xxh3_64_digest(tensors[n]) for n in sorted(tensors)])
    assert (status.frozen, status.applied.term, status.word) == (True, 0, "serving")
    state = await model_state(fleet)
    assert (state.frozen, [v.number for v in state.served], state.term) == (True, [0], 0)
    tokens, spans, _ = await fleet.generate("e0", 4)
    weights = weights_of({n: hashlib.sha256(data).digest() for n, data in tensors.items()})
    assert (tokens, spans) == ([token_of(weights, [1, 2, 3], i, 256) for i in range(4)], [(0, 0, 4)])


async def test_an_engine_that_loaded_the_same_joins_and_one_that_did_not_is_refused_for_good(
    fleet: LocalFleet,
) -> None:
    start_engine(fleet, "e0", {"seed": 1}, initial="serve")
    await routable(fleet, "e0", 0)
    start_engine(fleet, "e1", {"seed": 1}, initial="serve")
    await routable(fleet, "e1", 0)
    start_engine(fleet, "e2", {"seed": 2}, initial="serve")
    assert await asyncio.wait_for(fleet.tasks.pop("e2"), PATIENCE_SECONDS) == ExitCode.CONFIG
    start_engine(fleet, "e3", {"seed": 1})  # it waits for a first push that nobody will make
    assert await asyncio.wait_for(fleet.tasks.pop("e3"), PATIENCE_SECONDS) == ExitCode.CONFIG
    assert {e.status.engine.engine_id for e in (await fleet.view()).engines} == {"e0", "e1"}


async def test_a_frozen_model_takes_no_update_and_no_trainer(fleet: LocalFleet) -> None:
    start_engine(fleet, "e0", initial="serve")
    await routable(fleet, "e0", 0)
    fleet.term = 1
    stream = await open_directly(fleet, "e0", WeightVersion(1, Term(1)))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stream.open()
    assert from_rpc_error(error.value).reason == "MODEL_FROZEN"
    hello = fleet_pb2.TrainerHello(
        run_id=RUN,
        model="policy",
        trainer_id="t",
        incarnation="i",
        ranks=[fleet_pb2.TrainerRankInfo(rank=0, host_id="h", device_uuid="d")],
    )
    session: Any = fleet.fleet.Session()
    await session.write(fleet_pb2.SessionRequest(trainer_hello=hello))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await session.read()
    assert from_rpc_error(error.value).reason == "MODEL_FROZEN"
    assert (await fleet.generate("e0", 3))[1] == [(0, 0, 3)]


async def test_a_trained_model_takes_no_engine_that_serves_what_it_loaded(fleet: LocalFleet) -> None:
    await fleet.take_lease()
    start_engine(fleet, "e0", initial="serve")
    assert await asyncio.wait_for(fleet.tasks.pop("e0"), PATIENCE_SECONDS) == ExitCode.CONFIG


async def test_asleep_it_keeps_what_it_loaded_and_will_not_drop_it(fleet: LocalFleet) -> None:
    start_engine(fleet, "e0", initial="serve")
    await routable(fleet, "e0", 0)
    me = Person(fleet, "e0")
    before = await fleet.generate("e0", 4)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await me.sleep(level=2)
    assert from_rpc_error(error.value).reason == "MODEL_FROZEN"
    assert (await me.sleep()).residency == engine_pb2.RESIDENCY_ASLEEP
    await me.wake()
    assert await fleet.generate("e0", 4) == before


async def test_a_frozen_model_is_served_again_after_a_restart_of_the_coordinator_and_of_its_engine(
    fleet: LocalFleet,
) -> None:
    start_engine(fleet, "e0", initial="serve")
    await routable(fleet, "e0", 0)
    await fleet.stop("coordinator")
    await fleet.start_coordinator()
    await eventually(lambda: _served(fleet))
    await fleet.stop("e0")
    start_engine(fleet, "e0", {"seed": 2}, initial="serve")
    assert await asyncio.wait_for(fleet.tasks.pop("e0"), PATIENCE_SECONDS) == ExitCode.CONFIG
    start_engine(fleet, "e0", initial="serve")
    await eventually(lambda: _served(fleet))
    assert (await fleet.generate("e0", 3))[1] == [(0, 0, 3)]


async def _served(fleet: LocalFleet) -> bool:
    views = [e for e in (await fleet.view()).engines if e.known and e.routable]
    return [v.status.applied.number for v in views] == [FROZEN.number]

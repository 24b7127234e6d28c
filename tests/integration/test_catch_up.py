"""Catch-up, healing and rollback end to end: the coordinator brings versions from checkpoints, and no trainer lives."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from controlplane import failpoints
from controlplane.rpc.errors import from_rpc_error
from tests.support.checkpoint_fleet import (
    checkpoint_fleet,
    checkpoint_root,
    keep,
    roll_back,
    routable,
    start_engine,
    words_of,
)
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.writer import Weights
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with checkpoint_fleet(tmp_path) as running:
        yield running


def trainer_dies(fleet: LocalFleet) -> None:
    """Without a word."""
    fleet._trainer.cancel()


async def says(fleet: LocalFleet, engine_id: str, weights: Weights, number: int) -> None:
    """It makes these weights' tokens, under this number."""
    assert (await fleet.generate(engine_id, 4))[:2] == (words_of(weights), [(number, 0, 4)])


async def view_of(fleet: LocalFleet, engine_id: str) -> operator_pb2.EngineView | None:
    views = [v for v in (await fleet.view()).engines if v.status.engine.engine_id == engine_id]
    return views[0] if views else None


async def refused(fleet: LocalFleet, engine_id: str) -> str:
    """Wait for the reason with which it would not take a version."""
    reason = ""

    async def check() -> bool:
        nonlocal reason
        view = await view_of(fleet, engine_id)
        reason = "" if view is None else view.status.refused.reason
        return bool(reason)

    await eventually(check)
    return reason


async def test_a_joiner_is_brought_to_what_is_served_without_the_trainer(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    weights = Weights()
    state = await fleet.push(weights)
    await keep(fleet, weights, state)
    trainer_dies(fleet)
    start_engine(fleet, "e2")
    await routable(fleet, "e2", 2)
    for engine_id in ("e0", "e1", "e2"):
        await says(fleet, engine_id, weights, 2)
    status = await fleet.status("e2")
    assert status.content_digest == weights.digest
    assert status.update.update_id.startswith("catch-up-")
    assert status.applied == state.version


async def test_an_engine_that_comes_back_is_brought_up_again(fleet: LocalFleet) -> None:
    weights = Weights()
    await keep(fleet, weights, await fleet.push(weights))
    trainer_dies(fleet)
    await fleet.stop("e0")
    start_engine(fleet, "e0")
    await routable(fleet, "e0", 1)
    await says(fleet, "e0", weights, 1)


async def test_p1_a_poisoned_engine_heals_from_the_checkpoint(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.push(Weights())
    monkeypatch.setenv(failpoints.DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "worker.install").write_text("raise after=1")
    weights = Weights()
    state = await fleet.push(weights)
    assert state.phase == fleet_pb2.UPDATE_PHASE_DEGRADED
    (poisoned,) = [o.engine.engine_id for o in state.engines if o.stage == engine_pb2.UPDATE_STAGE_FAILED]
    assert (await fleet.status(poisoned)).word == "poisoned"
    trainer_dies(fleet)
    with pytest.raises(grpc.aio.AioRpcError):
        await fleet.generate(poisoned, 3)
    await keep(fleet, weights, state)
    await routable(fleet, poisoned, 2)
    await says(fleet, poisoned, weights, 2)


async def test_a_restarted_coordinator_brings_up_a_joiner_under_its_own_higher_term(fleet: LocalFleet) -> None:
    weights = Weights()
    await keep(fleet, weights, await fleet.push(weights))
    trainer_dies(fleet)
    await fleet.stop("coordinator")
    await fleet.start_coordinator()
    start_engine(fleet, "e2")
    await routable(fleet, "e2", 1)
    assert (await fleet.status("e2")).update.update_id.startswith("catch-up-2-")
    await says(fleet, "e2", weights, 1)


async def test_a_push_goes_on_while_a_checkpoint_is_there_and_a_joiner_gets_the_newest(fleet: LocalFleet) -> None:
    older, newer = Weights(), Weights()
    await keep(fleet, older, await fleet.push(older))
    start_engine(fleet, "e2")
    await routable(fleet, "e2", 1)
    state = await fleet.push(newer)
    assert sorted(o.engine.engine_id for o in state.engines) == ["e0", "e1", "e2"]
    await says(fleet, "e2", newer, 2)
    start_engine(fleet, "e3")  # of number 2 there is no checkpoint yet: what is not served is not brought
    await eventually(lambda: _is_known(fleet, "e3"))
    assert (await fleet.status("e3")).word == "empty"
    await keep(fleet, newer, state)
    await routable(fleet, "e3", 2)
    await says(fleet, "e3", newer, 2)


async def _is_known(fleet: LocalFleet, engine_id: str) -> bool:
    view = await view_of(fleet, engine_id)
    return view is not None and view.known


async def test_inv5_a_rollback_is_a_new_number_with_the_old_content_on_every_engine(fleet: LocalFleet) -> None:
    good, bad = Weights(), Weights()
    await keep(fleet, good, await fleet.push(good))
    await fleet.push(bad)
    trainer_dies(fleet)
    state = await roll_back(fleet, 1)
    assert (state.phase, state.version.number, state.restores.number) == (fleet_pb2.UPDATE_PHASE_COMMITTED, 3, 1)
    assert state.content_digest == good.digest
    for engine_id in ("e0", "e1"):
        status = await fleet.status(engine_id)
        assert (status.applied.number, status.content_digest) == (3, good.digest)
        await routable(fleet, engine_id, 3)
        await says(fleet, engine_id, good, 3)
    view = await fleet.view()
    assert [v.number for v in view.state.models[0].served] == [3]
    assert view.updates[0].restores.number == 1


async def test_after_a_rollback_the_trainer_pushes_on(fleet: LocalFleet) -> None:
    good, better = Weights(), Weights()
    await keep(fleet, good, await fleet.push(good))
    await fleet.push(Weights())
    await roll_back(fleet, 1)
    assert (await fleet.push(better)).version.number == 4
    await says(fleet, "e0", better, 4)


async def test_a_joiner_after_a_rollback_is_brought_to_the_new_number(fleet: LocalFleet) -> None:
    good = Weights()
    await keep(fleet, good, await fleet.push(good))
    await fleet.push(Weights())
    state = await roll_back(fleet, 1)
    await keep(fleet, good, state)
    start_engine(fleet, "e2")
    await routable(fleet, "e2", 3)
    await says(fleet, "e2", good, 3)


def _corrupt(fleet: LocalFleet, name: str) -> Path:
    file = sorted((checkpoint_root(fleet) / name).glob("*.safetensors"))[0]
    with file.open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last[0] ^ 1]))
    return file


async def test_a_corrupted_checkpoint_is_refused_hurts_nobody_and_is_tried_again_later(fleet: LocalFleet) -> None:
    weights = Weights()
    await keep(fleet, weights, await fleet.push(weights))
    _corrupt(fleet, "policy-1")
    start_engine(fleet, "e2")
    assert await refused(fleet, "e2") == "CHECKSUM_MISMATCH"
    first = (await fleet.status("e2")).update.update_id
    for engine_id in ("e0", "e1"):
        await says(fleet, engine_id, weights, 1)
    status = await fleet.status("e2")
    assert status.word in ("empty", "receiving"), "it is tried again by and by"
    assert not status.HasField("applied")
    view = await view_of(fleet, "e2")
    assert view is not None
    assert (view.routable, view.desired.number) == (False, 1)
    _corrupt(fleet, "policy-1")  # the bit again: it is whole
    await routable(fleet, "e2", 1)
    assert (await fleet.status("e2")).update.update_id != first
    await says(fleet, "e2", weights, 1)


async def test_a_rollback_to_a_corrupted_checkpoint_fails_before_go_and_every_engine_serves_on(
    fleet: LocalFleet,
) -> None:
    older, weights = Weights(), Weights()
    await keep(fleet, older, await fleet.push(older))
    await fleet.push(weights)
    _corrupt(fleet, "policy-1")
    state = await roll_back(fleet, 1)
    assert state.phase == fleet_pb2.UPDATE_PHASE_FAILED
    assert "the bytes received have checksum" in state.cause  # by the engine's report or its writer's, who comes first
    for engine_id in ("e0", "e1"):
        await says(fleet, engine_id, weights, 2)


async def test_engines_without_a_root_are_left_for_the_next_push(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path, 1) as fleet:
        weights = Weights()
        await keep(fleet, weights, await fleet.push(weights))
        start_engine(fleet, "e1", checkpoint_root=None)
        await fleet.wait_for_engines(2)
        newer = Weights()
        await fleet.push(newer)
        await says(fleet, "e1", newer, 2)
        engines = {view.status.engine.engine_id: view for view in (await fleet.view()).engines}
        assert not engines["e1"].status.HasField("refused"), "nobody tried to bring it what it cannot read"


async def test_a_rollback_to_a_number_of_which_there_is_no_checkpoint_is_refused(fleet: LocalFleet) -> None:
    await fleet.push(Weights())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await roll_back(fleet, 1)
    assert from_rpc_error(error.value).reason == "CHECKPOINT_UNKNOWN"

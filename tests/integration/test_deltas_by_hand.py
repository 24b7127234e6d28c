"""Deltas at an engine agent, over real gRPC: applied to just the base that they name, or refused; nothing leaks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.core.errors import InstallFailed
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.engine import InstallReport, StagedWeights
from engine_agent.memory.engine import MemoryEngine
from tests.support.checkpoint_fleet import Person, checkpoint_fleet, keep, routable, start_engine, words_of
from tests.support.deltas_by_hand import (
    base_of,
    open_delta,
    push_delta,
    record,
    send_chunk,
    send_delta,
    spoil,
    staged_files,
    trained,
    until_ready,
)
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.refusals import reason_of
from tests.support.writer import LAYOUT, Weights
from weightplane.v1 import fleet_pb2, weight_update_pb2


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with checkpoint_fleet(tmp_path, 1, deltas=True) as running:
        yield running


async def held(fleet: LocalFleet) -> tuple[Weights, weight_update_pb2.Base]:
    """Fresh weights, pushed whole; and how a delta names them."""
    weights = Weights()
    state = await fleet.push(weights)
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    return weights, base_of(state.version, weights)


async def serves(fleet: LocalFleet, weights: Weights) -> None:
    assert (await fleet.generate("e0", 4))[0] == words_of(weights)


async def test_a_delta_results_in_just_the_new_weights_and_is_the_next_ones_base(fleet: LocalFleet) -> None:
    old, base = await held(fleet)
    for tensors in ([0], [0, 1], []):
        new = trained(old, tensors)
        state = await push_delta(fleet, base, old, new)
        assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
        await serves(fleet, new)
        old, base = new, base_of(state.version, new)
    assert len(staged_files()) == 1


async def test_inv5_a_delta_goes_only_to_what_is_held_now(fleet: LocalFleet) -> None:
    _, base = await held(fleet)
    new, _ = await held(fleet)
    begun = await fleet.begin()
    assert await reason_of(open_delta(fleet, begun, base).open()) == "BASE_MISMATCH"
    await serves(fleet, new)


async def test_inv4_an_aborted_delta_costs_nothing_and_its_base_takes_the_next(fleet: LocalFleet) -> None:
    old, base = await held(fleet)
    begun = await fleet.begin()
    stream = open_delta(fleet, begun, base)
    await stream.open()
    described, data = record(0, old, trained(old))
    await send_chunk(stream, 0, [described], data)
    await stream.send(abort=weight_update_pb2.Abort(version=stream.version, reason="no more"))
    assert await reason_of(until_ready(stream)) == "UPDATE_ABORTED"
    await abandon(fleet, begun)
    await serves(fleet, old)
    assert len(staged_files()) == 1
    new = trained(old)
    await push_delta(fleet, base, old, new)
    await serves(fleet, new)


async def test_inv4_an_install_that_failed_untouched_keeps_the_base_that_was(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, base = await held(fleet)

    async def fails(engine: MemoryEngine, staged: StagedWeights) -> InstallReport:
        raise InstallFailed("e0", staged.label, False, "no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryEngine, "install", fails)
        assert (await push_delta(fleet, base, old, trained(old))).phase == fleet_pb2.UPDATE_PHASE_FAILED
    await serves(fleet, old)
    assert len(staged_files()) == 1
    new = trained(old)
    assert (await push_delta(fleet, base, old, new)).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    await serves(fleet, new)


async def test_inv4_poison_ends_the_base_until_a_whole_update_comes(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    old, base = await held(fleet)
    (tmp_path / "worker.install").write_text("raise")
    assert (await push_delta(fleet, base, old, trained(old))).phase == fleet_pb2.UPDATE_PHASE_FAILED
    assert staged_files() == []
    begun = await fleet.begin()
    assert await reason_of(open_delta(fleet, begun, base).open()) == "ENGINE_POISONED"
    await abandon(fleet, begun)
    old, base = await held(fleet)
    new = trained(old)
    await push_delta(fleet, base, old, new)
    await serves(fleet, new)


async def test_a_sleep_that_drops_the_weights_drops_the_base_too(fleet: LocalFleet) -> None:
    _, base = await held(fleet)
    me = Person(fleet, "e0")
    await me.sleep(level=2)
    assert staged_files() == []
    await me.wake()
    begun = await fleet.begin()
    assert await reason_of(open_delta(fleet, begun, base).open()) == "BASE_MISMATCH"


async def test_a_sleep_that_keeps_the_weights_keeps_the_base(fleet: LocalFleet) -> None:
    old, base = await held(fleet)
    me = Person(fleet, "e0")
    await me.sleep(level=1)
    await me.wake()
    new = trained(old)
    await push_delta(fleet, base, old, new)
    await serves(fleet, new)


async def test_l2_a_new_life_has_no_base(fleet: LocalFleet) -> None:
    _, base = await held(fleet)
    await fleet.stop("e0")
    assert staged_files() == []
    start_engine(fleet, "e0", deltas=True)
    await fleet.wait_for_engines(1)
    begun = await fleet.begin()
    assert await reason_of(open_delta(fleet, begun, base).open()) == "BASE_MISMATCH"


async def test_a_version_that_came_from_a_checkpoint_is_a_base_too(fleet: LocalFleet) -> None:
    old = Weights()
    state = await fleet.push(old)
    await keep(fleet, old, state)
    await fleet.stop("e0")
    start_engine(fleet, "e0", deltas=True)
    await routable(fleet, "e0", 1)
    new = trained(old)
    assert (await push_delta(fleet, base_of(state.version, old), old, new)).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    await serves(fleet, new)


async def test_m3_a_delta_whose_result_is_not_what_it_says_is_refused(fleet: LocalFleet) -> None:
    old, base = await held(fleet)
    new = trained(old)
    described, data = record(0, old, new)
    described.checksum = trained(old).checksums[0]
    stream = open_delta(fleet, await fleet.begin(), base)
    await stream.open()
    await send_chunk(stream, 0, [described], data)
    assert await reason_of(until_ready(stream)) == "CHECKSUM_MISMATCH"
    await serves(fleet, old)


@pytest.mark.parametrize("tensor", [0, 1], ids=["that changes", "that does not"])
async def test_m3_a_base_whose_bytes_went_bad_is_not_installed_again(fleet: LocalFleet, tensor: int) -> None:
    old, base = await held(fleet)
    spoil(tensor and -(-LAYOUT.tensors[0].byte_count // 64) * 64)
    stream = open_delta(fleet, await fleet.begin(), base)
    await stream.open()
    await send_delta(stream, old, trained(old))
    assert await reason_of(until_ready(stream)) == "CHECKSUM_MISMATCH"
    await serves(fleet, old)


async def test_a_delta_by_shared_memory_is_refused(fleet: LocalFleet) -> None:
    _, base = await held(fleet)
    stream = open_delta(fleet, await fleet.begin(), base, transport=weight_update_pb2.TRANSPORT_SHARED_MEMORY)
    assert await reason_of(stream.open()) == "INVALID_MESSAGE"


async def test_indexes_that_leave_their_tensor_are_refused(fleet: LocalFleet) -> None:
    old, base = await held(fleet)
    described, data = record(1, old, trained(old, [1], count=1))
    stream = open_delta(fleet, await fleet.begin(), base)
    await stream.open()
    await send_chunk(stream, 0, [described], (15).to_bytes(4, "little") + data[4:])
    assert await reason_of(until_ready(stream)) == "INVALID_MESSAGE"
    await serves(fleet, old)


async def test_an_engine_whose_agent_keeps_nothing_takes_no_delta(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path, 1, keep_staging=False) as fleet:
        old, base = await held(fleet)
        assert staged_files() == []
        begun = await fleet.begin()
        assert await reason_of(open_delta(fleet, begun, base).open()) == "UNSUPPORTED_BY_ENGINE"
        await serves(fleet, old)


async def abandon(fleet: LocalFleet, begun: fleet_pb2.BeginUpdateResponse) -> None:
    request = fleet_pb2.AbortUpdateRequest(
        run_id=RUN, update_id=begun.update_id, term=fleet.term, reason="the writer gave up"
    )
    await fleet.fleet.AbortUpdate(request, timeout=60)

"""P5: what one owner holds - a lease, an update's slot, an engine - when that owner ends by an exception."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from controlplane.core.errors import LeaseHeld, UpdateInProgress
from controlplane.failpoints import DIRECTORY_VARIABLE
from controlplane.rpc.errors import from_rpc_error
from tests.cases.cargo import TRANSPORTS, Transport, refusals, transport_name
from tests.cases.fleet import CaseFleet, case_fleet
from tests.cases.samples import WITHIN
from tests.cases.sessions import Trainer
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN
from tests.support.writer import LAYOUT, Weights
from weightplane.v1 import engine_pb2, fleet_pb2, weight_update_pb2

TTL = 2.0
MARGIN = 20.0
"""Seconds beyond a time limit that a busy machine may take; other limits are 60 s at least."""


class OwnersBug(Exception):
    """What ends an owner."""


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path, lease=False, lease_ttl_seconds=TTL, ready_limit_seconds=60.0) as running:
        yield running


async def granted(fleet: CaseFleet, trainer_id: str, refused: list[LeaseHeld]) -> Trainer:
    """The lease, asked for until it is given."""

    async def ask() -> Trainer:
        try:
            return await fleet.new_trainer(trainer_id)
        except grpc.aio.AioRpcError as error:
            refusal = from_rpc_error(error)
            assert isinstance(refusal, LeaseHeld), str(refusal)
            refused.append(refusal)
            raise AssertionError(str(refusal)) from error

    return await eventually(ask, within=WITHIN)


async def an_owner(fleet: CaseFleet, *, opens: bool) -> None:
    """Takes the lease, begins an update, is in the middle of it, and raises."""
    trainer = await fleet.new_trainer("owner")
    begun = await fleet.begin()
    attempt = fleet.delivery(begun, "e0", fleet.cargo(Weights()))
    try:
        if opens:
            await attempt.open()
            await attempt.chunk(0)
        raise OwnersBug
    finally:  # as a process that ends: its connections do
        attempt.stream.cut()
        trainer.die()


@pytest.mark.parametrize("opens", [False, True], ids=["before_its_stream", "in_its_stream"])
async def test_P5_a_lease_and_the_update_under_it_outlive_their_owner_by_the_leases_time_and_no_more(
    fleet: CaseFleet, opens: bool
) -> None:
    died_after = time.monotonic()
    with pytest.raises(OwnersBug):
        await an_owner(fleet, opens=opens)
    refused: list[LeaseHeld] = []
    heir = await granted(fleet, "heir", refused)
    assert time.monotonic() - died_after < TTL + MARGIN
    assert heir.term == 2
    assert {(r.holder, r.term) for r in refused} == {("owner", 1)}
    assert all(0 <= r.remaining_seconds <= TTL for r in refused)
    (left,) = (await fleet.view()).updates
    assert left.phase == fleet_pb2.UPDATE_PHASE_FAILED
    await fleet.wait_for_engines(1)
    assert (await fleet.deliver(Weights())).version.number == 2
    assert await fleet.applied("e0") == 2


async def test_P5_an_owner_that_leaves_or_is_proved_dead_keeps_nobody_waiting(fleet: CaseFleet) -> None:
    first = await fleet.new_trainer("one")
    await first.leave()
    second = await fleet.new_trainer("two")
    second.die()
    third = await fleet.new_trainer("two", ended_incarnation=second.hello.incarnation)
    assert [t.term for t in (first, second, third)] == [1, 2, 3]
    with refusals("LEASE_HELD"):
        await fleet.new_trainer("four", ended_incarnation=third.hello.incarnation)


async def test_P5_a_newcomer_hears_its_welcome_before_anything_else(fleet: CaseFleet) -> None:
    """Whoever reads a term out of another frame holds a lease that was never given."""
    await fleet.new_trainer("one")
    newcomer = fleet.session()
    await fleet.deliver(Weights())  # the fleet's state changes while the newcomer's hello is on its way
    hello = fleet_pb2.TrainerHello(
        run_id=RUN,
        model="policy",
        trainer_id="two",
        incarnation="life",
        ranks=[fleet_pb2.TrainerRankInfo(rank=0, host_id="elsewhere", device_uuid="CPU-other")],
        takeover=True,
    )
    await newcomer.say(trainer_hello=hello)
    first = await newcomer.hear()
    assert first.WhichOneof("frame") == "welcome"
    assert first.welcome.trainer_term == 2


async def test_P5_an_update_that_nobody_carries_on_ends_by_its_own_limit(fleet: CaseFleet) -> None:
    """Its trainer lives, and has forgotten it: the lease does not end it."""
    trainer = await fleet.new_trainer("forgetful")
    request = fleet_pb2.BeginUpdateRequest(
        run_id=RUN,
        model="policy",
        term=trainer.term,
        request_id="forgotten",
        layout_digest=LAYOUT.digest,
        byte_count=LAYOUT.byte_count,
    )
    request.ready_limit.FromMilliseconds(700)
    began = time.monotonic()
    forgotten = await fleet.fleet.BeginUpdate(request, timeout=60)
    with refusals("UPDATE_IN_PROGRESS") as got:
        await fleet.begin()
    assert isinstance(got[0], UpdateInProgress)
    assert got[0].update_id == forgotten.update_id
    state = await fleet.decided(forgotten.update_id)
    assert time.monotonic() - began < 0.7 + MARGIN
    assert state.phase == fleet_pb2.UPDATE_PHASE_FAILED
    assert "not ready in time: e0" in state.cause
    assert (await fleet.deliver(Weights())).phase == fleet_pb2.UPDATE_PHASE_COMMITTED


async def test_P5_an_update_whose_commit_never_comes_ends_by_the_limit_of_go(tmp_path: Path) -> None:
    async with case_fleet(tmp_path, go_limit_seconds=0.7) as fleet:
        begun = await fleet.begin()
        attempt = fleet.delivery(begun, "e0", fleet.cargo(Weights()))
        await attempt.until_ready()
        await fleet.go(begun.update_id)
        went = time.monotonic()
        state = await fleet.decided(begun.update_id)
        assert time.monotonic() - went < 0.7 + MARGIN
        assert state.phase == fleet_pb2.UPDATE_PHASE_FAILED
        assert "no outcome before the deadline" in state.engines[0].error_message
        attempt.stream.cut()
        await fleet.say_until(
            begun.plan.assignments[0].endpoint, lambda s: s.update.stage == engine_pb2.UPDATE_STAGE_ABORTED
        )
        assert (await fleet.deliver(Weights())).phase == fleet_pb2.UPDATE_PHASE_COMMITTED


# ---- the engine's slot --------------------------------------------------------------------------

IDLE = 1.0


@pytest.mark.parametrize("transport", TRANSPORTS, ids=transport_name)
@pytest.mark.parametrize("how", ["dies", "ends", "falls_silent", "sends_nonsense", "gives_up"])
async def test_P5_an_engine_is_free_again_whatever_became_of_the_one_that_wrote_to_it(
    tmp_path: Path, how: str, transport: Transport
) -> None:
    """The next writer, of the same term, is not told UPDATE_IN_PROGRESS for longer than the stream's limit."""
    async with case_fleet(tmp_path, engines=0) as fleet:
        fleet.start_engine_at("e0", stream_idle_seconds=IDLE if how == "falls_silent" else 60.0)
        await fleet.wait_for_engines(1)
        begun = await fleet.begin()
        owner = fleet.delivery(begun, "e0", fleet.cargo(Weights(), transport))
        await owner.open()
        await owner.chunk(0)
        stopped = time.monotonic()
        if how == "dies":
            owner.stream.cut()
        elif how == "ends":
            await owner.stream.end()
        elif how == "sends_nonsense":
            await owner.chunk(0)
        elif how == "gives_up":
            await owner.stream.send(abort=weight_update_pb2.Abort(version=begun.version, reason="a rank raised"))
        assert (await fleet.decided(begun.update_id)).phase == fleet_pb2.UPDATE_PHASE_FAILED
        assert time.monotonic() - stopped < (IDLE if how == "falls_silent" else 0.0) + MARGIN
        heir = fleet.delivery(begun, "e0", fleet.cargo(Weights(), transport), update_id="heir")
        await heir.until_ready()
        heir.stream.cut()
        assert (await fleet.deliver(Weights(), transport)).phase == fleet_pb2.UPDATE_PHASE_COMMITTED


@pytest.mark.parametrize(
    "point", ["engine.between_chunks", "engine.before_install", "engine.mid_install", "engine.after_install"]
)
async def test_P5_an_agent_whose_own_code_raises_in_an_update_takes_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Its locks are in its own process: between two chunks the stream's, in an install those of gate and install."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    async with case_fleet(tmp_path / "fleet") as fleet:
        life = (await fleet.engine("e0")).status.engine.incarnation
        begun = await fleet.begin()
        owner = fleet.delivery(begun, "e0", fleet.cargo(Weights()))
        (tmp_path / point).write_text("raise")
        if point == "engine.between_chunks":
            with pytest.raises(grpc.aio.AioRpcError):
                await owner.until_ready()
        else:
            await owner.until_ready()
            await fleet.go(begun.update_id)
            await owner.commit()
            assert (await owner.refusal()).reason == "ENGINE_DIED"
            await fleet.wait_for_a_life_after(life)
        assert (await fleet.decided(begun.update_id)).phase == fleet_pb2.UPDATE_PHASE_FAILED
        weights = Weights()
        state = await asyncio.wait_for(fleet.deliver(weights), WITHIN)
        assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
        assert (await fleet.generate("e0", 3))[1] == [(2, 0, 3)]

"""V4, P1, P3: installs that fail, on one engine and on one of eight. Nobody serves a half or claims the new version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from controlplane.core.errors import CanaryFailed, DeadlineExceeded, EngineDied, InstallFailed, InstallTimedOut
from controlplane.core.sample_spans import POISONED
from controlplane.failpoints import DIRECTORY_VARIABLE
from tests.cases.cargo import refusals
from tests.cases.engines import Hand, Hands
from tests.cases.fleet import CaseFleet, case_fleet
from tests.cases.samples import tokens_of
from tests.cases.sessions import Notes, number_of
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.obedient import ObedientRanks
from tests.support.toy_trainer import fleet_for_toys, toy_trainer
from tests.support.writer import Weights
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2, operator_pb2_grpc


@pytest.fixture
async def fleet(tmp_path: Path, hands: Hands) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path, memory={"seconds_per_token": 0.002}) as running:
        yield running


# ---- V4 -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    point: str
    error: Exception
    after: str
    """What the engine is then: old (in force, serving), poisoned, or reborn (another life, unset)."""


FAILURES = {
    "before_the_first_byte": Failure("first_byte", InstallFailed("e0", "1.2", False, "no room"), "old"),
    "half_way": Failure("half", InstallFailed("e0", "1.2", True, "a worker raised"), "poisoned"),
    "in_the_canary": Failure("canary", CanaryFailed("e0", "1.2", "NaN"), "poisoned"),
    "by_time": Failure("half", InstallTimedOut("e0", "1.2", 1.0), "reborn"),
    "by_death": Failure("half", EngineDied("e0", "killed"), "reborn"),
    "by_an_error_that_nobody_planned_for": Failure("half", ZeroDivisionError("a bug"), "reborn"),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
async def test_V4_a_load_that_fails_never_leaves_the_new_version_behind(
    fleet: CaseFleet, hands: Hands, failure: Failure
) -> None:
    old = Weights()
    await fleet.deliver(old)
    before = await fleet.engine("e0")
    statuses, views = fleet.note_statuses(before.endpoint), fleet.note_views()
    await eventually(lambda: bool(views.told))
    hands["e0"].fail(failure.point, failure.error)
    begun = await fleet.begin()
    attempt = fleet.delivery(begun, "e0", fleet.cargo(Weights()))
    await attempt.until_ready()
    await fleet.go(begun.update_id)
    await attempt.commit()
    refusal = await attempt.refusal()
    assert refusal.reason == (getattr(failure.error, "reason", "") or "ENGINE_DIED"), str(refusal)
    assert (await fleet.decided(begun.update_id)).phase == fleet_pb2.UPDATE_PHASE_FAILED
    if failure.after == "reborn":
        after = await fleet.wait_for_a_life_after(before.status.engine.incarnation)
        assert (after.status.word, after.routable) == ("empty", False)
    status = await fleet.status("e0")
    if failure.after == "old":
        assert (number_of(status), status.content_digest) == (1, old.digest)
        tokens, spans, _ = await fleet.generate("e0", 4)
        assert (tokens, spans) == (tokens_of(old, 4), [(1, 0, 4)])
    else:
        assert (number_of(status), status.gate_open) == (None, False)
        assert (status.word == "poisoned") is (failure.after == "poisoned")
        with refusals("ENGINE_POISONED", "ENGINE_NOT_READY"):
            await fleet.generate("e0", 1, wait=0.1)
    claimed = {number_of(s) for s in (*statuses.told, *(e.status for v in views.told for e in v.engines))}
    assert claimed <= {None, 1}
    assert {r.number for v in views.told for m in v.state.models for r in m.served} == {1}


async def test_V4_an_engine_whose_first_load_fails_holds_what_it_held_before_it_nothing(
    fleet: CaseFleet, hands: Hands
) -> None:
    hands["e0"].fail("first_byte", InstallFailed("e0", "1.1", False, "no room"))
    assert (await fleet.deliver(Weights())).phase == fleet_pb2.UPDATE_PHASE_FAILED
    status = await fleet.status("e0")
    assert (number_of(status), status.weights, status.word) == (None, engine_pb2.WEIGHTS_STATE_UNSET, "empty")


async def test_V4_an_engine_that_cannot_be_stopped_in_time_keeps_its_old_version(
    fleet: CaseFleet, hands: Hands
) -> None:
    old = Weights()
    await fleet.deliver(old)
    hands["e0"].fail("quiesce", DeadlineExceeded("quiesce", "the last tokens", 1.0))
    begun = await fleet.begin()
    attempt = fleet.delivery(begun, "e0", fleet.cargo(Weights()))
    await attempt.until_ready()
    await fleet.go(begun.update_id)
    await attempt.commit()
    assert (await attempt.refusal()).reason == "DEADLINE_EXCEEDED"
    tokens, spans, _ = await fleet.generate("e0", 4)
    assert (tokens, spans) == (tokens_of(old, 4), [(1, 0, 4)])


# ---- P1 -----------------------------------------------------------------------------------------


async def _stays_shut(fleet: CaseFleet, hand: Hand, endpoint: str, after: str) -> None:
    status = await fleet.status_at(endpoint)
    assert (status.word, status.gate_open, number_of(status)) == ("poisoned", False, None), after
    with refusals("ENGINE_POISONED"):
        await fleet.sample_at(endpoint, 1, wait=0.1).end()
    assert hand.engine is not None
    assert (hand.engine.makes_tokens, hand.engine.tokens_of_a_mixture) == (False, 0), after


async def test_P1_a_half_updated_engine_serves_nothing_whatever_resume_comes(fleet: CaseFleet, hands: Hands) -> None:
    old = Weights()
    await fleet.deliver(old)
    endpoint = (await fleet.engine("e0")).endpoint
    live = [await fleet.sample("e0", 2000) for _ in range(3)]
    await asyncio.gather(*(s.has(3) for s in live))
    hands["e0"].fail("half", InstallFailed("e0", "1.2", True, "a worker raised"))
    failed = await fleet.deliver_and_fail(Weights())
    routes = fleet.note_routes()
    stays_shut = partial(_stays_shut, fleet, hands["e0"], endpoint)
    await stays_shut("the failure")
    for owner in ("me", "trainer", "e0", failed.update_id, "poisoned"):
        await fleet.resume("e0", owner)
        await stays_shut(f"the resume of {owner}")
    await fleet.pause("e0")
    await fleet.resume("e0")
    await stays_shut("a pause and its resume")
    given_up = await fleet.begin()
    attempt = fleet.delivery(given_up, "e0", fleet.cargo(Weights()))
    await attempt.until_ready()
    attempt.stream.cut()
    await fleet.decided(given_up.update_id)
    await stays_shut("an update that was given up")
    hands["e0"].fail("first_byte", InstallFailed("e0", "1.4", False, "no room"))
    await fleet.deliver_and_fail(Weights())
    await stays_shut("an update that touched nothing: what it was before is what it is")
    hands["e0"].fail("quiesce", DeadlineExceeded("quiesce", "nobody", 1.0))
    await fleet.deliver_and_fail(Weights())
    await stays_shut("an update that could not even begin")
    await fleet.new_trainer("successor", takeover=True)
    await stays_shut("another trainer")
    assert [route for told in routes.told for route in told.routes] == []
    for sample in live:
        assert (await sample.reason(), (await sample.end()).stop_reason) == ("ABORT", POISONED)
        assert [s[0] for s in await sample.checked_spans({1: old})] == [1]
    healing = Weights()
    state = await fleet.deliver(healing)
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    tokens, spans, _ = await fleet.generate("e0", 4)
    assert (tokens, spans) == (tokens_of(healing, 4), [(state.version.number, 0, 4)])


async def test_P1_a_restarted_coordinator_that_serves_what_the_engine_held_before_opens_nothing(
    fleet: CaseFleet, hands: Hands
) -> None:
    await fleet.deliver(Weights())
    hands["e0"].fail("half", InstallFailed("e0", "1.2", True, "a worker raised"))
    await fleet.deliver_and_fail(Weights())
    await fleet.stop("coordinator")
    await fleet.start_coordinator()
    await fleet.wait_for_engines(1)
    view = await fleet.view()
    assert [v.number for v in view.state.models[0].served] == [1]
    assert not view.engines[0].routable
    with refusals("ENGINE_POISONED"):
        await fleet.generate("e0", 1, wait=0.1)


@pytest.mark.parametrize("point", ["half", "canary"])
async def test_P1_a_resume_inside_the_install_opens_nothing_and_no_token_leaves(
    fleet: CaseFleet, hands: Hands, point: str
) -> None:
    """Live samples stand still with what they have, and go on under the version that the install ends with."""
    made_by = {1: Weights(), 2: Weights()}
    await fleet.deliver(made_by[1])
    hands["e0"].limit_samples(60)
    live = [await fleet.sample("e0", 61) for _ in range(3)]
    await asyncio.gather(*(s.has(3) for s in live))
    begun = await fleet.begin()
    attempt = fleet.delivery(begun, "e0", fleet.cargo(made_by[2]))
    await attempt.until_ready()
    await fleet.go(begun.update_id)
    stands = hands["e0"].hold(point)
    await attempt.commit()
    await stands.reached.wait()
    for owner in ("me", "trainer", "e0", begun.update_id):
        await fleet.pause("e0", owner)
        await fleet.resume("e0", owner)
        assert not (await fleet.status("e0")).gate_open
    with refusals("ENGINE_NOT_READY"):
        await fleet.generate("e0", 1, wait=0.1)
    assert {n for s in live for n in s.numbers} == {1}
    stands.go.set()
    await attempt.applied()
    await fleet.decided(begun.update_id)
    hands["e0"].limit_samples(None)
    for sample in live:
        assert await sample.reason() == "LENGTH"
        assert [s[0] for s in await sample.checked_spans(made_by)] == [1, 2]


# ---- P3 -----------------------------------------------------------------------------------------

EIGHT = [f"e{i}" for i in range(8)]


async def test_P3_one_of_eight_fails_and_the_trainers_report_has_eight_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real rank. The failed engine is shut until its next push, which heals it; the other seven serve meanwhile."""
    (tmp_path / "worker.install").write_text("raise after=2")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    async with fleet_for_toys(tmp_path / "fleet", engines=8) as fleet, toy_trainer(fleet.address) as trainer:
        views = Notes(
            operator_pb2_grpc.OperatorStub(fleet.channel(fleet.address)).WatchFleet(operator_pb2.WatchFleetRequest()),
            lambda response: response.fleet,
        )
        ranks = await ObedientRanks.start(trainer, world=1)
        (first,) = await ranks.all("push", step=1)
        (failed,) = [engine for engine, outcome in first["outcomes"].items() if outcome != "APPLIED"]
        await fleet.settled()
        await eventually(lambda: _words(views.told, failed)[-1:] == ["poisoned"])
        (second,) = await ranks.all("push", step=2)
        await eventually(lambda: _all_hold(fleet, 2))
        assert await ranks.leave() == [0]
        updates = {u.version.number: u for u in (await fleet.view()).updates}
        await views.close()
    assert sorted(first["outcomes"]) == EIGHT
    assert (first["status"], first["outcomes"][failed]) == ("DEGRADED", "FAILED: INSTALL_FAILED")
    healthy = {e: outcome for e, outcome in second["outcomes"].items() if e != failed}
    assert (second["status"], healthy) == ("COMMITTED", dict.fromkeys(sorted({*EIGHT} - {failed}), "APPLIED"))
    told = {o.engine.engine_id: (o.stage, o.lost) for o in updates[1].engines}
    assert told == {
        e: (engine_pb2.UPDATE_STAGE_FAILED if e == failed else engine_pb2.UPDATE_STAGE_APPLIED, False) for e in EIGHT
    }
    assert "failpoint worker.install" in next(
        o.error_message for o in updates[1].engines if o.engine.engine_id == failed
    )
    assert "poisoned" in _words(views.told, failed)


async def _all_hold(fleet: LocalFleet, number: int) -> bool:
    """The poisoned one too, for which the decision does not wait."""
    return {await fleet.applied(engine_id) for engine_id in EIGHT} == {number}


def _words(views: list[operator_pb2.FleetView], failed: str) -> list[str]:
    """What is told of the engine that failed, from the first decision to the next. No view sends anyone to it."""
    words = []
    for view in views:
        by_name = {e.status.engine.engine_id: e for e in view.engines}
        served = [v.number for v in view.state.models[0].served] if view.state.models else []
        if failed in by_name and served == [1]:
            words.append(by_name[failed].status.word)
            assert not by_name[failed].routable
    return words


async def test_P3_an_engine_that_is_lost_and_one_that_refuses_are_named_beside_those_that_applied(
    tmp_path: Path, hands: Hands
) -> None:
    """After go: e0's install fails, e1 dies and starts again, the other six apply. Eight outcomes, and it goes on."""
    async with case_fleet(tmp_path, engines=8) as fleet:
        await fleet.deliver(Weights())
        hands["e0"].fail("half", InstallFailed("e0", "1.2", True, "out of memory in layer 17"))
        stands = hands["e1"].hold("half")
        weights, begun = Weights(), await fleet.begin()
        cargo = fleet.cargo(weights)
        deliveries = {e: fleet.delivery(begun, e, cargo) for e in EIGHT}
        await asyncio.gather(*(d.until_ready() for d in deliveries.values()))
        await fleet.go(begun.update_id)
        await asyncio.gather(*(d.commit() for d in deliveries.values()))
        await stands.reached.wait()
        await fleet.crash("e1")
        fleet.start_engine_at("e1")
        state = await fleet.decided(begun.update_id)
        assert state.phase == fleet_pb2.UPDATE_PHASE_DEGRADED
        outcomes = {o.engine.engine_id: o for o in state.engines}
        assert sorted(outcomes) == EIGHT
        assert (outcomes["e0"].stage, outcomes["e0"].error_reason) == (
            engine_pb2.UPDATE_STAGE_FAILED,
            "INSTALL_FAILED",
        )
        assert "out of memory in layer 17" in outcomes["e0"].error_message
        assert outcomes["e1"].lost
        assert {o.stage for e, o in outcomes.items() if e not in ("e0", "e1")} == {engine_pb2.UPDATE_STAGE_APPLIED}
        for name in ("e0", "e1"):
            assert name in state.cause
        await eventually(lambda: fleet.routable_are({*EIGHT} - {"e0", "e1"}))

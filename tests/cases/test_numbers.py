"""V8, V11: numbers only grow, whoever restarts; and unset is not any number."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.engine_state import EngineState, Held, Life, Poisoned, Unset, Weights
from controlplane.core.errors import DeadlineExceeded, VersionUnavailable
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, WeightVersion
from controlplane.rollout.client import RolloutClient
from controlplane.rpc.engine_codec import state_to_proto
from tests.cases.cargo import TRANSPORTS, Transport, refusals, transport_name
from tests.cases.fleet import CaseFleet, case_fleet
from tests.cases.samples import PROMPT
from tests.cases.sessions import number_of
from tests.support import writer
from tests.support.eventually import eventually
from tests.support.fake_fleet import FakeEngine, finish, new_fleet, says, serve_engine, serve_fleet, tokens
from tests.support.local_fleet import RUN
from tests.support.toy_rank import Script
from tests.support.toy_trainer import fleet_for_toys, toy_trainer
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2, operator_pb2_grpc, version_pb2


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path, lease_ttl_seconds=60.0) as running:  # silence is no matter here
        yield running


# ---- V8 -----------------------------------------------------------------------------------------


def check_growth(views: list[operator_pb2.FleetView]) -> None:
    """Nothing that was ever shown went back: what is served, the ordinals, the numbers of updates."""
    served = [v.state.models[0].served[-1].number for v in views if v.state.models and v.state.models[0].served]
    ordinals = [v.state.models[0].ordinal for v in views if v.state.models]
    assert served == sorted(served)
    assert ordinals == sorted(ordinals)


async def test_V8_a_trainer_that_begins_again_at_step_one_gets_higher_numbers_also_from_a_new_coordinator(
    tmp_path: Path,
) -> None:
    """Real ranks, twice: 3 steps, a new coordinator, a new life of the ranks, 3 steps."""
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        pushed: list[dict[str, Any]] = []
        for life in ("0", "1"):
            if life == "1":
                await fleet.stop("coordinator")
                await fleet.start_coordinator()
                await fleet.wait_for_engines(1)
            (rank,) = await trainer.start_ranks(Script(steps=3), world=1, WEIGHTPLANE_RESTART_COUNT=life)
            assert await rank.code() == 0
            pushed += rank.said("pushed")
        view = await fleet.view()
        applied = await fleet.applied("e0")
    assert [p["step"] for p in pushed] == [1, 2, 3, 1, 2, 3]
    assert [p["version"] for p in pushed] == [1, 2, 3, 4, 5, 6]
    assert applied == 6
    assert (view.state.models[0].ordinal, view.state.models[0].served[0].number) == (6, 6)
    assert [(u.version.number, u.step) for u in view.updates] == [(6, 3), (5, 2), (4, 1)]


async def test_V8_neither_failovers_nor_restarts_nor_lost_updates_bring_a_number_back(fleet: CaseFleet) -> None:
    """Each life of a trainer counts its own steps from 1, and none of them matters to anything."""
    views = fleet.note_views()
    numbers, terms = [], []
    for life in range(6):
        if life == 3:  # an update is open, and is never heard of again
            numbers.append((await fleet.begin(step=2)).version.number)
            await fleet.stop("coordinator")
            check_growth(views.told)
            await fleet.start_coordinator()
            await fleet.wait_for_engines(1)
            views = fleet.note_views()
        terms.append((await fleet.new_trainer(f"life-{life}", takeover=True)).term)
        for step in (1, 2):
            state = await fleet.deliver(writer.Weights(), step=step)
            assert (state.phase, state.step) == (fleet_pb2.UPDATE_PHASE_COMMITTED, step)
            numbers.append(state.version.number)
            _, spans, _ = await fleet.generate("e0", 3, min_version=state.version)
            assert spans == [(numbers[-1], 0, 3)]
    assert numbers == list(range(1, 14)), "each was given once, the lost update's too"
    assert terms == sorted(set(terms))
    model = (await fleet.view()).state.models[0]
    assert (model.served[0].number, model.ordinal) == (13, 12)
    check_growth(views.told)


async def test_V8_a_coordinator_that_lost_its_ledger_gives_no_number_that_was_given_before(fleet: CaseFleet) -> None:
    """It would begin at 1 again; but engines remember better. A person may accept the loss: then it goes on above."""
    for step in (1, 2, 3):
        await fleet.deliver(writer.Weights(), step=step)
    await fleet.stop("coordinator")
    shutil.rmtree(fleet.directory / "coordinator")
    await fleet.start_coordinator()
    await fleet.wait_for_engines(1)
    with refusals("LEDGER_REGRESSED"):
        await fleet.new_trainer("next", takeover=True)
    assert await fleet.applied("e0") == 3
    stub: Any = operator_pb2_grpc.OperatorStub(fleet.channel(fleet.address))
    await stub.AcceptLedger(operator_pb2.AcceptLedgerRequest(accepted_by="me"), timeout=60)
    await fleet.wait_for_engines(1)  # everybody comes anew
    assert (await fleet.new_trainer("next", takeover=True)).term > 1
    assert (await fleet.deliver(writer.Weights(), step=1)).version.number == 4


# ---- V11 ----------------------------------------------------------------------------------------


def pin(number: int, term: int = 0) -> version_pb2.WeightVersion:
    return version_pb2.WeightVersion(term=term, number=number)


async def test_V11_an_engine_without_an_update_says_unset_wherever_it_is_asked(fleet: CaseFleet) -> None:
    engine = await fleet.engine("e0")
    for status in (await fleet.status("e0"), engine.status):
        assert not status.HasField("applied")
        assert status.weights == engine_pb2.WEIGHTS_STATE_UNSET
        assert (status.content_digest, status.gate_open, status.word) == (b"", False, "empty")
    assert not engine.routable
    routes = fleet.note_routes()
    await eventually(lambda: bool(routes.told))
    assert (list(routes.told[0].routes), list(routes.told[0].served)) == ([], [])
    assert list((await fleet.view()).state.models[0].served) == []


@pytest.mark.parametrize("wanted", [None, pin(0), pin(1, 1), pin(2**62, 1)], ids=["no_pin", "0.0", "1.1", "huge"])
async def test_V11_unset_meets_no_pin_not_even_the_lowest_nor_none_at_all(
    fleet: CaseFleet, wanted: version_pb2.WeightVersion | None
) -> None:
    expected = "ENGINE_NOT_READY" if wanted is None else "VERSION_UNAVAILABLE"
    with refusals(expected) as got:
        await fleet.generate("e0", 1, min_version=wanted, wait=0.1)
    if isinstance(got[0], VersionUnavailable):
        assert got[0].applied == "unset"
    async with RolloutClient(fleet.address, wait_seconds=0.2) as rollouts:
        wants = None if wanted is None else WeightVersion(wanted.number, Term(wanted.term))
        with pytest.raises(DeadlineExceeded, match="a routable engine"):
            await rollouts.generate(PROMPT, SamplingSettings(max_tokens=1), min_version=wants)


@pytest.mark.parametrize("transport", TRANSPORTS, ids=transport_name)
async def test_V11_version_zero_is_a_version_and_the_wire_tells_it_from_unset(
    fleet: CaseFleet, transport: Transport
) -> None:
    """All of its numbers are zero, as in a message in which nothing was set."""
    begun = await fleet.begin()
    weights = writer.Weights()
    attempt = fleet.delivery(begun, "e0", fleet.cargo(weights, transport), version=pin(0))
    await attempt.until_ready()
    assert not (await fleet.status("e0")).HasField("applied")
    await attempt.commit()
    assert (await attempt.applied()).version == pin(0)
    status = await fleet.status("e0")
    assert status.HasField("applied")
    assert (number_of(status), status.weights) == (0, engine_pb2.WEIGHTS_STATE_HELD)
    again = engine_pb2.EngineStatus.FromString(status.SerializeToString())
    assert again.HasField("applied")
    assert not status.gate_open, "the fleet does not serve it"


def _contradictions() -> dict[str, engine_pb2.EngineStatus]:
    def status(weights: engine_pb2.WeightsState.ValueType) -> engine_pb2.EngineStatus:
        return engine_pb2.EngineStatus(
            engine=version_pb2.EngineRef(engine_id="liar", incarnation="i"),
            run_id=RUN,
            model="policy",
            life=engine_pb2.ENGINE_LIFE_RUNNING,
            weights=weights,
            residency=engine_pb2.RESIDENCY_AWAKE,
            gate_open=True,
        )

    made = {
        "held_without_a_version": status(engine_pb2.WEIGHTS_STATE_HELD),
        "held_with_an_empty_version": status(engine_pb2.WEIGHTS_STATE_HELD),
        "unset_with_a_version": status(engine_pb2.WEIGHTS_STATE_UNSET),
        "poisoned_with_a_version": status(engine_pb2.WEIGHTS_STATE_POISONED),
        "weights_not_said": status(engine_pb2.WEIGHTS_STATE_UNSPECIFIED),
    }
    made["held_with_an_empty_version"].applied.SetInParent()
    made["unset_with_a_version"].applied.CopyFrom(pin(1, 1))
    made["poisoned_with_a_version"].applied.CopyFrom(pin(1, 1))
    return made


@pytest.mark.parametrize("how", _contradictions())
async def test_V11_a_report_that_is_neither_set_nor_unset_is_refused(fleet: CaseFleet, how: str) -> None:
    hello = fleet_pb2.EngineHello(
        status=_contradictions()[how], endpoint="127.0.0.1:1", host_id="h", device_uuids=["d"], max_number=0
    )
    session = fleet.session()
    await session.say(engine_hello=hello)
    assert (await session.end()).reason == "INVALID_MESSAGE"
    assert await fleet.find_engine("liar") is None


SERVED_SETS = [
    frozenset[WeightVersion](),
    frozenset({WeightVersion(0, Term(0))}),
    frozenset({WeightVersion(1, Term(1))}),
]


@pytest.mark.parametrize("served", SERVED_SETS, ids=["none", "0.0", "1.1"])
@pytest.mark.parametrize("weights", [Unset(), Poisoned("a mixture")], ids=["unset", "poisoned"])
def test_V11_whatever_is_served_what_is_unset_is_not_it(weights: Weights, served: frozenset[WeightVersion]) -> None:
    state = EngineState(RunId("r"), ModelName("m"), EngineId("e"), Incarnation("i"), life=Life.RUNNING, weights=weights)
    assert state.applied is None
    assert not state.gate_open(served)
    assert not state_to_proto(state, served).HasField("applied")
    assert all(state.applied != version for version in served)
    with pytest.raises(TypeError):
        assert WeightVersion(0, Term(0)) > state.applied  # type: ignore[operator]


def test_V11_the_lowest_version_is_held_and_served_like_any_other() -> None:
    zero = WeightVersion(0, Term(0))
    state = EngineState(
        RunId("r"), ModelName("m"), EngineId("e"), Incarnation("i"), life=Life.RUNNING, weights=Held(zero, b"d" * 32)
    )
    assert state.gate_open(frozenset({zero}))
    assert not state.gate_open(frozenset())
    assert state_to_proto(state, frozenset({zero})).HasField("applied")


async def test_V11_a_route_without_a_version_is_no_route_to_version_zero() -> None:
    """Also where a coordinator, wrongly, tells of an engine that is unset."""
    unset = FakeEngine("unset", says(tokens(7), finish((1, 0, 1))), applied=None)
    zero = FakeEngine("zero", says(tokens(8), finish((1, 0, 1))), applied=WeightVersion(0, Term(0)))
    fake = new_fleet()
    servers = [await serve_fleet(fake), await serve_engine(unset), await serve_engine(zero)]
    try:
        fake.publish(unset, zero)
        async with RolloutClient(servers[0].address, wait_seconds=60.0) as rollouts:
            for _ in range(4):
                sample = await rollouts.generate(
                    PROMPT, SamplingSettings(max_tokens=1), min_version=WeightVersion(0, Term(0))
                )
                assert sample.engine_id == "zero"
    finally:
        for running in servers:
            await running.stop()
    assert unset.requests == []

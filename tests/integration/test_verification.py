"""Engines that say something else after an install than they should: found by the others, or by the trainer's word.

In-memory engines, with a hand on what they say; real agents and a real coordinator.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.core.canary import CanaryReference
from controlplane.rpc.engine_codec import reference_to_proto
from engine_agent.memory.engine import MemoryEngine, score_of, weights_of
from tests.cases.cargo import refusals
from tests.cases.engines import Hands
from tests.cases.fleet import CaseFleet, case_fleet
from tests.support.eventually import eventually
from tests.support.writer import LAYOUT, Weights
from weightplane.v1 import engine_pb2, fleet_pb2, weight_update_pb2

PROMPT = (5, 6, 7)


@pytest.fixture
async def three(tmp_path: Path, hands: Hands) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path, engines=3) as running:
        yield running


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of engines that put in something else than they were brought: as a layer that was not loaded would be."""
    names: list[str] = []
    true = MemoryEngine.canary

    async def canary(self: MemoryEngine, prompt: tuple[int, ...] | None = None) -> object:
        if self._engine_id in names:
            self._weights = bytes(reversed(self._weights))
            names.remove(self._engine_id)
        return await true(self, prompt)

    monkeypatch.setattr(MemoryEngine, "canary", canary)
    return names


async def test_the_one_of_three_that_says_something_else_never_serves_and_the_next_push_heals_it(
    three: CaseFleet, liar: list[str]
) -> None:
    liar.append("e1")
    state = await three.deliver(Weights())
    assert state.phase == fleet_pb2.UPDATE_PHASE_DEGRADED
    outcomes = {o.engine.engine_id: o for o in state.engines}
    assert outcomes["e1"].error_reason == "CANARY_DISAGREES"
    assert {outcomes[n].verification for n in ("e0", "e2")} == {engine_pb2.VERIFICATION_MAJORITY}
    await eventually(lambda: poisoned(three, "e1"))
    assert "2 of 3 equal engines" in (await three.status("e1")).poison_cause
    await eventually(lambda: three.routable_are({"e0", "e2"}))
    healed = await three.deliver(Weights())
    assert healed.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    await eventually(lambda: three.routable_are({"e0", "e1", "e2"}))
    await eventually(lambda: by_majority(three))


async def test_a_doubted_engine_that_leaves_is_no_trouble_to_the_others(three: CaseFleet, liar: list[str]) -> None:
    liar.append("e1")
    await three.deliver(Weights())
    await three.stop("e1")
    assert (await three.deliver(Weights())).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    await eventually(lambda: three.routable_are({"e0", "e2"}))


async def by_majority(fleet: CaseFleet) -> bool:
    return {e.verification for e in (await fleet.view()).engines} == {engine_pb2.VERIFICATION_MAJORITY}


async def poisoned(fleet: CaseFleet, engine_id: str) -> bool:
    status = await fleet.status(engine_id)
    return status.weights == engine_pb2.WEIGHTS_STATE_POISONED and not status.gate_open


async def test_of_two_nobody_is_believed_more_and_both_are_unverified(
    tmp_path: Path, hands: Hands, liar: list[str]
) -> None:
    async with case_fleet(tmp_path, engines=2) as fleet:
        liar.append("e1")
        state = await fleet.deliver(Weights())
        assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
        assert {o.verification for o in state.engines} == {engine_pb2.VERIFICATION_UNVERIFIED}


async def test_the_coordinators_setting_says_how_far_equals_may_be_apart(
    tmp_path: Path, hands: Hands, liar: list[str]
) -> None:
    async with case_fleet(tmp_path, engines=3, canary_tolerance=100.0) as fleet:
        liar.append("e1")
        state = await fleet.deliver(Weights())
        assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
        assert {o.verification for o in state.engines} == {engine_pb2.VERIFICATION_MAJORITY}


async def bring(fleet: CaseFleet, weights: Weights, reference: CanaryReference) -> fleet_pb2.UpdateState:
    """A push to e0 whose manifest has the trainer's word. Raises the stream's refusal."""
    begun, cargo = await fleet.begin(), fleet.cargo(weights, count=1)
    manifest = weight_update_pb2.Manifest(
        layout_digest=LAYOUT.digest,
        tensor_count=len(LAYOUT.tensors),
        byte_count=LAYOUT.byte_count,
        reference=reference_to_proto(reference),
    )
    attempt = fleet.delivery(begun, "e0", cargo, manifest=manifest)
    await attempt.until_ready()
    await fleet.go(begun.update_id)
    await attempt.commit()
    return await fleet.decided(begun.update_id)


def reference(weights: Weights, wrong: float = 0.0) -> CanaryReference:
    """Of an in-memory engine with these weights."""
    parts = {t.name: hashlib.sha256(p).digest() for t, p in zip(LAYOUT.tensors, weights.parts, strict=True)}
    scored = [score_of(weights_of(parts), PROMPT, i) + wrong for i in (1, 2)]
    return CanaryReference(PROMPT, tuple(scored), 0.01)


@pytest.fixture
async def one(tmp_path: Path, hands: Hands) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path) as running:
        yield running


async def test_an_engine_that_says_what_the_trainer_says_is_verified_by_reference(one: CaseFleet) -> None:
    weights = Weights()
    state = await bring(one, weights, reference(weights))
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    assert state.engines[0].verification == engine_pb2.VERIFICATION_REFERENCE
    assert (await one.status("e0")).canary.by_reference


async def test_inv4_an_engine_that_says_something_else_than_the_trainer_is_poisoned_and_shut(one: CaseFleet) -> None:
    weights = Weights()
    state = await bring(one, weights, reference(weights, wrong=0.5))
    assert state.phase == fleet_pb2.UPDATE_PHASE_FAILED
    assert state.engines[0].error_reason == "CANARY_FAILED"
    assert "differ from the trainer's by up to 0.5" in state.engines[0].error_message
    assert await poisoned(one, "e0")


@pytest.mark.parametrize(
    ("tokens", "reason"), [((5,), "INVALID_MESSAGE"), ((5, 256), "INVALID_REQUEST")], ids=["too short", "no such token"]
)
async def test_a_reference_that_the_engine_cannot_be_asked_is_refused_before_anything_is_touched(
    one: CaseFleet, tokens: tuple[int, ...], reason: str
) -> None:
    held = await one.deliver(Weights())
    with refusals(reason):
        await bring(one, Weights(), CanaryReference(tokens, (-1.0,), 0.1))
    assert (await one.status("e0")).applied == held.version


async def test_a_push_of_just_what_is_held_is_told_to_have_changed_nothing(one: CaseFleet) -> None:
    weights = Weights()
    first = await one.deliver(weights)
    assert not first.engines[0].HasField("changed_tensors")
    again = await one.deliver(weights)
    outcome = again.engines[0]
    assert (outcome.changed_tensors, outcome.tensor_count) == (0, len(LAYOUT.tensors))

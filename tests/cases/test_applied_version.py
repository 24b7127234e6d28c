"""V1, V2, V9: what an engine says that it holds once a version came, whichever way and into whatever pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cases.cargo import CARRIERS, TRANSPORTS, Transport, refusals, transport_name
from tests.cases.claims import committed, every_transport, holds_exactly
from tests.cases.engines import Hands
from tests.cases.fleet import CaseFleet, case_fleet
from tests.cases.samples import WITHIN
from tests.cases.sessions import number_of
from tests.support.writer import Weights
from weightplane.v1 import engine_pb2, fleet_pb2, weight_update_pb2

NOT_BY_HAND = {
    weight_update_pb2.TRANSPORT_BROADCAST: "INVALID_MESSAGE",
    weight_update_pb2.TRANSPORT_CUDA_IPC: "UNSUPPORTED_BY_ENGINE",
}
"""What an engine without a GPU answers to an open frame that names one of these and no link."""


@pytest.fixture
async def fleet(tmp_path: Path, hands: Hands) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path) as running:
        yield running


# ---- V1 -----------------------------------------------------------------------------------------


def test_V1_every_transport_of_the_contract_is_tried_here() -> None:
    """Broadcast needs a sender's process group: the version that it records is tried in tests/contract, with links."""
    told = set(weight_update_pb2.Transport.values()) - {weight_update_pb2.TRANSPORT_UNSPECIFIED}
    here = {*CARRIERS, weight_update_pb2.TRANSPORT_CHECKPOINT, *NOT_BY_HAND}
    assert here == told, "say in tests/cases/cargo.py how bytes are handed over by the new transport"


@pytest.mark.parametrize("transport", NOT_BY_HAND, ids=transport_name)
async def test_V1_a_transport_without_its_way_is_refused_and_leaves_what_was_recorded(
    fleet: CaseFleet, transport: Transport
) -> None:
    weights = Weights()
    await committed(fleet, weights)
    stream = fleet.stream(await fleet.begin(), "e0", transport=transport)
    with refusals(NOT_BY_HAND[transport]):
        await stream.open()
        await stream.read()
    await holds_exactly(fleet, 1, weights)


async def test_V1_a_checkpoint_that_is_not_there_is_refused_and_leaves_what_was_recorded(fleet: CaseFleet) -> None:
    """No chunk follows this open frame. Once this passes, tell CARRIERS how a checkpoint is handed over."""
    weights = Weights()
    await committed(fleet, weights)
    stream = fleet.stream(
        await fleet.begin(), "e0", transport=weight_update_pb2.TRANSPORT_CHECKPOINT, checkpoint="not-there"
    )
    with refusals("CHECKPOINT_UNREADABLE"):
        await stream.open()
        async with asyncio.timeout(WITHIN):
            await stream.read()
    await holds_exactly(fleet, 1, weights)


@every_transport
async def test_V1_the_data_call_itself_records_the_version(fleet: CaseFleet, transport: Transport) -> None:
    for number in (1, 2, 3):
        weights = Weights()
        await committed(fleet, weights, transport)
        await holds_exactly(fleet, number, weights)


async def test_V1_each_transport_records_its_version_over_what_another_one_left(fleet: CaseFleet) -> None:
    for number, transport in enumerate([*TRANSPORTS, *reversed(TRANSPORTS), *TRANSPORTS], start=1):
        weights = Weights()
        await committed(fleet, weights, transport)
        await holds_exactly(fleet, number, weights)


@every_transport
async def test_V1_no_label_that_lies_in_an_engine_is_taken_for_a_version(
    fleet: CaseFleet, hands: Hands, transport: Transport
) -> None:
    """The engine was launched, or written to, by somebody who labelled it with the very number that comes next."""
    engine = hands["e0"].engine
    assert engine is not None
    engine.label = "1"
    assert await fleet.applied("e0") is None
    begun = await fleet.begin()
    attempt = fleet.delivery(begun, "e0", fleet.cargo(Weights(), transport))
    await attempt.until_ready()
    assert await fleet.applied("e0") is None
    attempt.stream.cut()
    assert (await fleet.decided(begun.update_id)).phase == fleet_pb2.UPDATE_PHASE_FAILED
    assert await fleet.applied("e0") is None
    weights = Weights()
    await committed(fleet, weights, transport)
    await holds_exactly(fleet, 2, weights)


# ---- V2 -----------------------------------------------------------------------------------------


@every_transport
@pytest.mark.parametrize("when", ["before_it", "between_chunks", "before_the_commit", "inside_the_install"])
async def test_V2_an_update_to_a_paused_engine_is_recorded_and_its_gate_stays_shut(
    fleet: CaseFleet, hands: Hands, transport: Transport, when: str
) -> None:
    first, second = Weights(), Weights()
    await committed(fleet, first, transport)
    if when == "before_it":
        await fleet.pause("e0")
    begun = await fleet.begin()
    attempt = fleet.delivery(begun, "e0", fleet.cargo(second, transport))
    await attempt.open()
    await attempt.chunk(0)
    if when == "between_chunks":
        await fleet.pause("e0")
    await attempt.chunk(1)
    await attempt.wait_for("ready")
    if when == "before_the_commit":
        await fleet.pause("e0")
    await fleet.go(begun.update_id)
    if when == "inside_the_install":
        stands = hands["e0"].hold("half")
        await attempt.commit()
        await stands.reached.wait()
        await fleet.pause("e0")
        stands.go.set()
    else:
        await attempt.commit()
    assert (await attempt.applied()).version.number == 2
    assert (await fleet.decided(begun.update_id)).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    status = await fleet.status("e0")
    assert (number_of(status), status.word, status.gate_open) == (2, "held", False)
    assert not await fleet.is_routable("e0")
    with refusals("ENGINE_NOT_READY"):
        await fleet.generate("e0", 4, wait=0.1)
    waiting = await fleet.sample("e0", 4)
    await fleet.resume("e0")
    assert await waiting.checked_spans({2: second}) == [(2, 0, 4)]
    assert (await fleet.status("e0")).gate_open


async def test_V2_every_owner_of_a_pause_must_end_it_before_the_new_version_is_served(fleet: CaseFleet) -> None:
    for owner in ("me", "you"):
        await fleet.pause("e0", owner)
    weights = Weights()
    await committed(fleet, weights)
    for owner in ("somebody else", "me", "me"):
        await fleet.resume("e0", owner)
        status = await fleet.status("e0")
        assert (number_of(status), status.gate_open) == (1, False), f"after {owner}"
    await fleet.resume("e0", "you")
    assert (await fleet.status("e0")).gate_open
    await holds_exactly(fleet, 1, weights)


# ---- V9 -----------------------------------------------------------------------------------------


@every_transport
async def test_V9_four_chunks_or_forty_make_one_version(fleet: CaseFleet, transport: Transport) -> None:
    for number, count in enumerate((4, 1, 40), start=1):
        weights = Weights()
        state = await committed(fleet, weights, transport, count)
        assert state.version.number == number
        await holds_exactly(fleet, number, weights)
        assert (await fleet.view()).state.models[0].ordinal == number


async def test_V9_the_number_is_the_coordinators_whatever_the_engine_was_called_meanwhile(fleet: CaseFleet) -> None:
    """Attempts that were given up, begun anew or repeated after their commit: none of them counts."""
    first = Weights()
    await committed(fleet, first, count=4)
    given_up = await fleet.begin()
    for _ in range(3):
        attempt = fleet.delivery(given_up, "e0", fleet.cargo(Weights(), count=4))
        await attempt.open()
        await attempt.chunk(0)
        attempt.stream.cut()
        await fleet.say_until(
            given_up.plan.assignments[0].endpoint, lambda s: s.update.stage == engine_pb2.UPDATE_STAGE_ABORTED
        )
    await fleet.decided(given_up.update_id)
    assert await fleet.applied("e0") == 1
    weights, begun = Weights(), await fleet.begin()
    cargo = fleet.cargo(weights, count=4)
    attempts = [fleet.delivery(begun, "e0", cargo) for _ in range(2)]
    for attempt in attempts:
        await attempt.until_ready()
    await fleet.go(begun.update_id)
    await attempts[-1].commit()
    await attempts[-1].applied()
    await fleet.decided(begun.update_id)
    again = fleet.delivery(begun, "e0", cargo)
    assert (await again.stream.open()).attached
    assert (await again.applied()).version.number == begun.version.number == given_up.version.number + 1
    await holds_exactly(fleet, begun.version.number, weights)
    await asyncio.gather(*(fleet.generate("e0", 2) for _ in range(3)))
    await holds_exactly(fleet, begun.version.number, weights)

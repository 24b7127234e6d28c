"""V6: two writers, check then set. Numbers race on real streams, and the older one never gets on top of the newer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from controlplane.core.errors import StaleVersion, UpdateInProgress, WeightplaneError
from controlplane.rpc.errors import from_rpc_error
from tests.cases.cargo import LOST_WORDS, TRANSPORTS, Delivery, Transport, refusals, transport_name
from tests.cases.engines import Hands
from tests.cases.fleet import CaseFleet, case_fleet
from tests.cases.samples import WITHIN
from tests.cases.sessions import number_of
from tests.support.writer import Weights
from weightplane.v1 import fleet_pb2, version_pb2

ROUNDS = 12
WRITERS_OF_EACH = 3


@pytest.fixture
async def fleet(tmp_path: Path, hands: Hands) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path) as running:
        yield running


@dataclass
class Writer:
    """A writer of one version that asks again for as long as it is only told that somebody else is at it."""

    fleet: CaseFleet
    begun: fleet_pb2.BeginUpdateResponse
    weights: Weights
    name: str
    number: int
    transport: Transport
    refusals: list[WeightplaneError] = field(default_factory=list)

    def attempt(self) -> Delivery:
        """Straight to the agent: what keeps it from harm is the agent alone."""
        return self.fleet.delivery(
            self.begun,
            "e0",
            self.fleet.cargo(self.weights, self.transport),
            update_id=self.name,
            version=version_pb2.WeightVersion(term=self.begun.version.term, number=self.number),
        )

    async def run(self, start: asyncio.Event) -> bool:
        """Whether this one applied it."""
        await start.wait()
        async with asyncio.timeout(WITHIN):
            while True:
                attempt = self.attempt()
                try:
                    await attempt.until_ready()
                    await attempt.commit()
                    await attempt.applied()
                    return True
                except grpc.aio.AioRpcError as error:
                    self.refusals.append(from_rpc_error(error))
                except asyncio.InvalidStateError:  # refused while it wrote
                    self.refusals.append(await attempt.refusal())
                if not isinstance(self.refusals[-1], UpdateInProgress):
                    return False


@pytest.mark.parametrize("transport", TRANSPORTS, ids=transport_name)
async def test_V6_six_and_seven_race_and_seven_is_held_in_the_end(fleet: CaseFleet, transport: Transport) -> None:
    begun = await fleet.begin()
    notes = fleet.note_statuses(begun.plan.assignments[0].endpoint)
    for older in range(6, 6 + 2 * ROUNDS, 2):
        weights = {older: Weights(), older + 1: Weights()}
        writers = [
            Writer(fleet, begun, weights[number], f"{number}-{i}", number, transport)
            for i in range(WRITERS_OF_EACH)
            for number in (older, older + 1)
        ]
        if older % 4:
            writers.reverse()  # each of the two comes first in half of the rounds
        start = asyncio.Event()
        runs = [asyncio.create_task(writer.run(start)) for writer in writers]
        start.set()
        applied = [w.number for w, done in zip(writers, await asyncio.gather(*runs), strict=True) if done]
        assert applied.count(older + 1) == 1
        assert applied.count(older) <= 1
        status = await fleet.status("e0")
        assert (number_of(status), status.content_digest) == (older + 1, weights[older + 1].digest)
        for writer in writers:
            _check_words(writer, {older, older + 1})
    numbers = [n for n in map(number_of, notes.told) if n is not None]
    assert numbers == sorted(numbers), "what it held once it went back from"


def _check_words(writer: Writer, racing: set[int]) -> None:
    """Each refusal names both numbers: the one that stands in the way, and (the writer's own) the one refused."""
    for refusal in writer.refusals:
        if isinstance(refusal, UpdateInProgress):
            assert int(refusal.version.partition(".")[2]) in racing
            assert refusal.update_id != writer.name
        else:
            assert isinstance(refusal, StaleVersion), str(refusal)
            assert (refusal.got, refusal.applied) == (writer.number, max(refusal.applied, writer.number))


async def test_V6_the_older_writer_that_was_let_in_first_keeps_the_newer_out_only_until_its_end(
    fleet: CaseFleet,
) -> None:
    """And it does not come again: what was checked at its first try says nothing about its second."""
    begun = await fleet.begin()
    six, seven = (Writer(fleet, begun, Weights(), f"w{n}", n, TRANSPORTS[0]) for n in (6, 7))
    first = six.attempt()
    await first.until_ready()
    for _ in range(3):
        refusal = await refused_at_open(seven)
        assert isinstance(refusal, UpdateInProgress)
        assert (refusal.update_id, refusal.version) == ("w6", f"{begun.version.term}.6")
    first.stream.cut()
    await fleet.say_until(begun.plan.assignments[0].endpoint, lambda s: s.update.error_reason == "UPDATE_ABORTED")
    assert await seven.run(_now())
    refusal = await refused_at_open(six)
    assert isinstance(refusal, StaleVersion)
    assert (refusal.applied, refusal.got) == (7, 6)
    assert await fleet.applied("e0") == 7


async def test_V6_six_is_refused_in_the_middle_of_the_install_of_seven(fleet: CaseFleet, hands: Hands) -> None:
    """While nothing at all is applied: the check is not made against what is held just then."""
    begun = await fleet.begin()
    six, seven = (Writer(fleet, begun, Weights(), f"w{n}", n, TRANSPORTS[0]) for n in (6, 7))
    stands = hands["e0"].hold("half")
    running = asyncio.create_task(seven.run(_now()))
    await stands.reached.wait()
    assert await fleet.applied("e0") is None
    refusal = await refused_at_open(six)
    assert isinstance(refusal, UpdateInProgress)
    assert refusal.update_id == "w7"
    stands.go.set()
    assert await running
    refusal = await refused_at_open(six)
    assert isinstance(refusal, StaleVersion)
    assert (refusal.applied, refusal.got) == (7, 6)


async def test_V6_an_older_number_is_refused_also_under_a_newer_term(fleet: CaseFleet) -> None:
    """A writer that was let in, and stood still while its successor wrote, is one more check-then-set."""
    begun = await fleet.begin()
    six, seven = (Writer(fleet, begun, Weights(), f"w{n}", n, TRANSPORTS[0]) for n in (6, 7))
    waits = six.attempt()
    await waits.until_ready()
    await fleet.new_trainer("successor", takeover=True)
    assert await seven.run(_now())
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await waits.commit()
    assert (await waits.refusal()).reason in ("STALE_TERM", LOST_WORDS)
    refusal = await refused_at_open(six)
    assert isinstance(refusal, StaleVersion)
    assert (refusal.applied, refusal.got) == (7, 6)
    assert await fleet.applied("e0") == 7


async def test_V6_of_many_begins_at_once_one_gets_a_number_and_the_others_its_name(fleet: CaseFleet) -> None:
    for number in (1, 2, 3):
        answers = await asyncio.gather(*(fleet.begin() for _ in range(16)), return_exceptions=True)
        (begun,) = [a for a in answers if isinstance(a, fleet_pb2.BeginUpdateResponse)]
        assert begun.version.number == number
        for answer in answers:
            if isinstance(answer, grpc.aio.AioRpcError):
                refusal = from_rpc_error(answer)
                assert isinstance(refusal, UpdateInProgress)
                assert (refusal.update_id, refusal.version) == (begun.update_id, f"{fleet.term}.{number}")
        weights = Weights()
        cargo = fleet.cargo(weights)
        attempt = fleet.delivery(begun, "e0", cargo)
        await attempt.until_ready()
        await fleet.go(begun.update_id)
        await attempt.commit()
        assert (await fleet.decided(begun.update_id)).phase == fleet_pb2.UPDATE_PHASE_COMMITTED


async def refused_at_open(writer: Writer) -> WeightplaneError:
    attempt = writer.attempt()
    with refusals("UPDATE_IN_PROGRESS", "STALE_VERSION") as refusal:
        await attempt.open()
    return refusal[0]


def _now() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event

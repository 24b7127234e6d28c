"""V1, V2, V3, V5, V9: what an engine says that it holds, on the way to a version and after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.core.assembly import Record
from controlplane.core.engine_core import EngineCore
from controlplane.core.engine_events import (
    ChunkArrived,
    CommitArrived,
    FleetChanged,
    LayoutArrived,
    Opened,
    Started,
    StreamEnded,
)
from controlplane.core.engine_state import EngineState
from controlplane.core.errors import ByteCountMismatch, UpdateAborted
from controlplane.core.layout import Expected
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from tests.cases.engines import Hands, lay_hands
from tests.cases.fleet import (
    CARRIERS,
    LOST_WORDS,
    TRANSPORTS,
    CaseFleet,
    Transport,
    case_fleet,
    number_of,
    refusals,
    transport_name,
)
from tests.cases.samples import tokens_of
from tests.support.local_fleet import LAYOUT, Weights
from weightplane.v1 import engine_pb2, fleet_pb2, weight_update_pb2

NOT_BY_HAND = {
    weight_update_pb2.TRANSPORT_BROADCAST: "INVALID_MESSAGE",
    weight_update_pb2.TRANSPORT_CUDA_IPC: "UNSUPPORTED_BY_ENGINE",
}
"""What an engine without a GPU answers to an open frame that names one of these and no link."""
every_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=transport_name)


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return lay_hands(monkeypatch)


@pytest.fixture
async def fleet(tmp_path: Path, hands: Hands) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path) as running:
        yield running


async def committed(
    fleet: CaseFleet, weights: Weights, transport: Transport = TRANSPORTS[0], count: int = 2
) -> fleet_pb2.UpdateState:
    state = await fleet.deliver(weights, transport, count)
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    return state


async def holds_exactly(fleet: CaseFleet, number: int, weights: Weights) -> None:
    """The agent says so, the coordinator says so, and the tokens say so."""
    status = await fleet.status("e0")
    assert (number_of(status), status.content_digest) == (number, weights.digest)
    assert number_of((await fleet.engine("e0")).status) == number
    tokens, spans, _ = await fleet.generate("e0", 4)
    assert (tokens, spans) == (tokens_of(weights, 4), [(number, 0, 4)])


# ---- V1 -----------------------------------------------------------------------------------------


def test_V1_every_transport_of_the_contract_is_tried_here() -> None:
    """Broadcast needs a sender's process group: the version that it records is tried in tests/contract, with links."""
    told = set(weight_update_pb2.Transport.values()) - {weight_update_pb2.TRANSPORT_UNSPECIFIED}
    here = {*CARRIERS, weight_update_pb2.TRANSPORT_CHECKPOINT, *NOT_BY_HAND}
    assert here == told, "say in tests/cases/fleet.py how bytes are handed over by the new transport"


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
        async with asyncio.timeout(1.0):
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


# ---- V3 -----------------------------------------------------------------------------------------


@every_transport
async def test_V3_asked_between_any_two_of_forty_chunks_it_never_claims_the_new_version(
    fleet: CaseFleet, transport: Transport
) -> None:
    endpoint = (await fleet.engine("e0")).endpoint
    notes, views = fleet.note_statuses(endpoint), fleet.note_views()
    for before, weights in ((None, Weights()), (1, Weights())):
        begun = await fleet.begin()
        attempt = fleet.delivery(begun, "e0", fleet.cargo(weights, transport, 40))
        await attempt.open()
        for index in range(40):
            await attempt.chunk(index)
            here = attempt.cargo.bytes_until(index)
            await fleet.say_until(endpoint, lambda status, here=here: status.update.bytes_received == here)  # type: ignore[misc]
            status = await fleet.status_at(endpoint)
            assert number_of(status) == before, f"after chunk {index} of 40"
            assert status.gate_open is (before is not None)
        await attempt.wait_for("ready")
        assert number_of(await fleet.status_at(endpoint)) == before
        await fleet.go(begun.update_id)
        assert number_of(await fleet.status_at(endpoint)) == before, "a go is no commit"
        await attempt.commit()
        await attempt.applied()
        await fleet.decided(begun.update_id)
    for status in [*notes.told, *(view.engines[0].status for view in views.told)]:
        if number_of(status) == status.update.version.number and status.HasField("update"):
            assert status.update.stage == engine_pb2.UPDATE_STAGE_APPLIED


@pytest.mark.parametrize("point", ["half", "canary"])
async def test_V3_inside_the_install_it_is_unset_for_everybody(fleet: CaseFleet, hands: Hands, point: str) -> None:
    """Nor is the old version claimed: it is gone."""
    await committed(fleet, Weights())
    weights, begun = Weights(), await fleet.begin()
    attempt = fleet.delivery(begun, "e0", fleet.cargo(weights))
    await attempt.until_ready()
    await fleet.go(begun.update_id)
    stands = hands["e0"].hold(point)
    await attempt.commit()
    await stands.reached.wait()
    status = await fleet.status("e0")
    assert (number_of(status), status.weights, status.word, status.gate_open) == (
        None,
        engine_pb2.WEIGHTS_STATE_UNSET,
        "installing",
        False,
    )
    stands.go.set()
    await attempt.applied()
    await fleet.decided(begun.update_id)
    await holds_exactly(fleet, 2, weights)


# ---- V5 -----------------------------------------------------------------------------------------


def _spoiled(chunk: weight_update_pb2.Chunk, how: str) -> weight_update_pb2.Chunk:
    if how == "CHECKSUM_MISMATCH":
        chunk.records[0].checksum = b"not this"
    elif how == "FRAME_OUT_OF_ORDER":
        chunk.index += 1
    elif how == "BYTE_COUNT_MISMATCH":
        chunk.records[-1].buffer_offset += 1
    return chunk


@every_transport
@pytest.mark.parametrize("how", ["CHECKSUM_MISMATCH", "FRAME_OUT_OF_ORDER", "BYTE_COUNT_MISMATCH"])
async def test_V5_a_commit_behind_a_failed_chunk_publishes_nothing(
    fleet: CaseFleet, transport: Transport, how: str
) -> None:
    """The caller does not look: it sends the rest, and finishes; then it finishes once more, by a call of its own."""
    old, new = Weights(), Weights()
    await committed(fleet, old, transport)
    begun = await fleet.begin()
    attempt = fleet.delivery(begun, "e0", fleet.cargo(new, transport, 1))
    await attempt.open()
    await attempt.send_anyway(chunk=_spoiled(attempt.cargo.chunk(begun.version, 0), how))
    await attempt.send_anyway(chunk=attempt.cargo.chunk(begun.version, 0))
    commit = weight_update_pb2.Commit(
        version=begun.version, chunk_count=1, byte_count=LAYOUT.byte_count, content_digest=new.digest
    )
    await attempt.send_anyway(commit=commit)
    assert (await attempt.refusal()).reason in (how, LOST_WORDS)
    finish = fleet.delivery(begun, "e0", attempt.cargo)
    await finish.open()
    await finish.send_anyway(commit=commit)
    assert (await finish.refusal()).reason in ("FRAME_OUT_OF_ORDER", "UPDATE_ABORTED")
    state = await fleet.decided(begun.update_id)
    assert (state.phase, state.engines[0].stage) == (fleet_pb2.UPDATE_PHASE_FAILED, engine_pb2.UPDATE_STAGE_ABORTED)
    assert state.engines[0].error_reason == how
    await holds_exactly(fleet, 1, old)


@pytest.mark.parametrize("how", ["abort_frame", "opened_again"])
async def test_V5_a_commit_of_an_aborted_attempt_is_refused(fleet: CaseFleet, how: str) -> None:
    """Everything came and was right, and a commit would have been taken; but this attempt is over."""
    old = Weights()
    await committed(fleet, old)
    begun = await fleet.begin()
    attempt = fleet.delivery(begun, "e0", fleet.cargo(Weights()))
    await attempt.until_ready()
    if how == "abort_frame":
        await attempt.stream.send(abort=weight_update_pb2.Abort(version=begun.version, reason="a rank went away"))
    else:
        await fleet.delivery(begun, "e0", attempt.cargo).open()
    await attempt.send_anyway(
        commit=weight_update_pb2.Commit(
            version=begun.version,
            chunk_count=2,
            byte_count=LAYOUT.byte_count,
            content_digest=attempt.cargo.weights.digest,
        )
    )
    assert (await attempt.refusal()).reason in ("UPDATE_ABORTED", LOST_WORDS)
    await holds_exactly(fleet, 1, old)


def test_V5_after_a_failed_chunk_the_core_refuses_the_commit_with_the_chunks_own_words() -> None:
    """On the wire the stream is over by then; here nothing stands between the failed chunk and the finish."""
    state = EngineState(RunId("run"), ModelName("policy"), EngineId("e0"), Incarnation("life"))
    core = EngineCore(state, term=Term(1), coordinator_term=Term(1), number=0)
    version = WeightVersion(1, Term(1))
    dtypes = {t.name: frozenset({t.dtype}) for t in LAYOUT.tensors}
    core.handle(Started(Expected(shapes={t.name: t.shape for t in LAYOUT.tensors}, dtypes=dtypes)), 0.0)
    core.handle(FleetChanged(Term(1), Term(1), frozenset()), 0.0)
    opened = Opened(
        stream=1,
        run_id=RunId("run"),
        model=ModelName("policy"),
        incarnation=Incarnation("life"),
        update_id=UpdateId("u1"),
        writer_term=Term(1),
        version=version,
        layout_digest=LAYOUT.digest,
        tensor_count=len(LAYOUT.tensors),
        byte_count=LAYOUT.byte_count,
    )
    core.handle(opened, 0.0)
    core.handle(LayoutArrived(1, LAYOUT), 0.0)
    with pytest.raises(ByteCountMismatch) as failure:
        core.handle(ChunkArrived(1, version, 0, [Record(0, 0, 0, 4001, b"checksum")], 4001), 0.0)
    core.handle(StreamEnded(1, str(failure.value), failure.value.reason), 0.0)
    with pytest.raises(UpdateAborted, match=str(failure.value)) as refusal:
        core.handle(CommitArrived(1, version, 1, LAYOUT.byte_count, Weights().digest), 0.0)
    assert refusal.value.update_id == "u1"
    assert core.state.applied is None


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

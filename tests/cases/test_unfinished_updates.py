"""V3, V5: what an engine says that it holds on the way to a version, and after an update that failed on the way."""

from __future__ import annotations

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
from tests.cases.cargo import LOST_WORDS, Transport
from tests.cases.claims import committed, every_transport, holds_exactly
from tests.cases.engines import Hands
from tests.cases.fleet import CaseFleet, case_fleet
from tests.cases.sessions import number_of
from tests.support.writer import LAYOUT, Weights
from weightplane.v1 import engine_pb2, fleet_pb2, weight_update_pb2


@pytest.fixture
async def fleet(tmp_path: Path, hands: Hands) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path) as running:
        yield running


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

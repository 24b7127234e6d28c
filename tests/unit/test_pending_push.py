"""A push under way, from the rank's side: what is heard in which order, and whose memory an answer frees."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from controlplane.core.errors import DeadlineExceeded, InvalidRequest, StaleTerm, UpdateFailed
from controlplane.core.layout import DType, Layout, TensorSpec
from tests.support.rank_agent import Agent, fence
from trainer_agent import wire
from trainer_agent.rank import PendingPush, trainer_rank
from trainer_agent.rank.gather import GatherGroups
from trainer_agent.rank.spawn import RankPlace
from trainer_agent.rank.trainer_rank import TrainerRank
from trainer_agent.source import WeightSource
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, version_pb2

LAYOUT = Layout((TensorSpec("w", DType.F32, (4,)),))
VERSION = version_pb2.WeightVersion(term=1, number=7)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path / "s")
    yield made
    made.close()


@pytest.fixture
def rank(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerRank:
    """With no part in any plan, so it only takes part in the iteration; and with little patience."""
    monkeypatch.setattr(trainer_rank, "ANSWER_GRACE_SECONDS", 0.0)
    source = cast("WeightSource", ())
    made = TrainerRank(agent.link, RankPlace(0, 1, 0, 0), LAYOUT, source, GatherGroups(0, tmp_path))
    made._push_seconds = 0.2
    return made


@pytest.fixture
def settled(rank: TrainerRank, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """What the rank's memory was told: (released, failed)."""
    told: list[tuple[bool, bool]] = []
    monkeypatch.setattr(rank._pushes.held, "settle", lambda *, released, failed: told.append((released, failed)))
    return told


def plan(sequence: int) -> rank_pb2.PushPlan:
    return rank_pb2.PushPlan(sequence=sequence, chunk_bytes=1 << 20)


def begun(agent: Agent, rank: TrainerRank, step: int) -> PendingPush:
    """The rank pushes; the agent answers with a plan when it hears of it."""

    def answer() -> None:
        while True:
            size = wire.body_length(agent.connection.recv(wire.HEADER_BYTES, socket.MSG_WAITALL))
            request = rank_pb2.RankRequest.FromString(agent.connection.recv(size, socket.MSG_WAITALL))
            if request.HasField("push_begin"):
                agent.say(push_plan=plan(request.push_begin.sequence))
                return

    answering = threading.Thread(target=answer)
    answering.start()
    try:
        return rank.push_async(step)
    finally:
        answering.join(60)


def committed(sequence: int, *, released: bool = True) -> rank_pb2.PushResult:
    state = fleet_pb2.UpdateState(version=VERSION, phase=fleet_pb2.UPDATE_PHASE_COMMITTED)
    return rank_pb2.PushResult(sequence=sequence, state=state, memory_released=released)


def failed(sequence: int, *, retry: bool) -> rank_pb2.PushResult:
    error = UpdateFailed(update_id="u", version="1.7", cause="c", outcomes="o")
    return rank_pb2.PushResult(
        sequence=sequence, error_reason=error.reason, error_metadata=error.metadata(), retry=retry, memory_released=True
    )


def test_inv_12_a_late_answer_to_a_push_that_was_given_up_frees_nothing_of_the_next_ones(
    agent: Agent, rank: TrainerRank, settled: list[tuple[bool, bool]]
) -> None:
    first = begun(agent, rank, 1)
    with pytest.raises(DeadlineExceeded, match="the fleet's decision"):
        rank.push_async(2)
    assert settled == [(False, True)], "nobody will say when it is free"
    begun(agent, rank, 3)
    agent.say(push_result=committed(1))
    assert first.done
    assert settled == [(False, True)]
    agent.say(push_result=committed(2, released=False))
    begun(agent, rank, 4)
    assert settled == [(False, True), (False, False)]


def test_a_decision_that_came_before_the_fence_is_heard_and_then_the_fence(agent: Agent, rank: TrainerRank) -> None:
    pending = begun(agent, rank, 1)
    agent.say(push_result=committed(1))
    agent.say(error=fence())
    assert pending.done
    assert pending.applied().version.number == 7
    with pytest.raises(StaleTerm):
        pending.serving()


def test_what_is_said_of_another_push_is_no_answer_to_this_one(agent: Agent, rank: TrainerRank) -> None:
    pending = begun(agent, rank, 1)
    agent.say(push_result=committed(9))
    agent.say(push_serving=rank_pb2.PushServing(sequence=9, engine_ids=["e"]))
    assert not pending.done
    agent.say(chunk_released=rank_pb2.ChunkReleased(sequence=9, index=99))
    pending.read(VERSION, 0)
    with pytest.raises(DeadlineExceeded, match="nobody to read its memory any more"):
        pending.released(0.05)


def test_memory_of_two_chunks_is_free_when_the_agent_has_read_the_last_and_before_the_decision(
    agent: Agent, rank: TrainerRank, settled: list[tuple[bool, bool]]
) -> None:
    pending = begun(agent, rank, 1)
    pending.read(VERSION, 3)
    agent.say(chunk_released=rank_pb2.ChunkReleased(sequence=1, index=2))
    with pytest.raises(DeadlineExceeded):
        pending.released(0.05)
    agent.say(chunk_released=rank_pb2.ChunkReleased(sequence=1, index=3))
    pending.released()
    assert not pending.done
    assert pending.so_far().status == "UNDECIDED"
    assert settled == [], "INV-12: the next push takes it only after the decision"
    agent.say(push_result=committed(1))
    assert pending.so_far().status == "COMMITTED"


def test_inv_12_memory_that_engines_read_is_free_only_with_the_decision(agent: Agent, rank: TrainerRank) -> None:
    pending = begun(agent, rank, 1)
    pending.read(VERSION, None)
    agent.say(chunk_released=rank_pb2.ChunkReleased(sequence=1, index=99))
    with pytest.raises(DeadlineExceeded):
        pending.released(0.05)
    agent.say(push_result=committed(1))
    pending.released()


def test_a_rank_that_sent_nothing_has_no_memory_to_wait_for(agent: Agent, rank: TrainerRank) -> None:
    pending = begun(agent, rank, 1)
    pending.released(0.0)
    assert not pending.done


@pytest.mark.parametrize(("retry", "notes"), [(True, 1), (False, 0)])
def test_an_error_says_that_the_next_push_heals_only_where_it_does(
    agent: Agent, rank: TrainerRank, retry: bool, notes: int
) -> None:
    pending = begun(agent, rank, 1)
    agent.say(push_result=failed(1, retry=retry))
    with pytest.raises(UpdateFailed) as raised:
        pending.applied()
    assert len(getattr(raised.value, "__notes__", [])) == notes


def test_serving_of_a_push_before_the_latest_is_heard_though_the_latest_is_asked_first(
    agent: Agent, rank: TrainerRank
) -> None:
    first = begun(agent, rank, 1)
    agent.say(push_result=committed(1))
    second = begun(agent, rank, 2)
    agent.say(push_serving=rank_pb2.PushServing(sequence=1, engine_ids=["e0"]))
    agent.say(push_result=committed(2))
    assert second.applied().serving == ()
    assert first.serving().serving == ("e0",)


def test_what_a_push_cannot_wait_for_is_refused_before_anything_is_said(agent: Agent, rank: TrainerRank) -> None:
    with pytest.raises(InvalidRequest, match="released, applied, serving, not 'done'"):
        rank.push(1, wait="done")  # type: ignore[arg-type]
    agent.connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        agent.connection.recv(1)

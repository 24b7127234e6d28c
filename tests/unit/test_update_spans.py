"""Spans of updates where they are made: after a restart, of ranks that are not asked for them, of ranks that fail."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from controlplane.coordinator.spans import trace_decided
from controlplane.core.engine_state import Stage
from controlplane.core.errors import LayoutInvalid
from controlplane.core.plan import Plan
from controlplane.core.traces import PUSH, UPDATE, update_span
from controlplane.core.update_outcomes import Outcome, Times
from controlplane.core.update_transaction import Phase, UpdateTransaction
from controlplane.core.versions import EngineId, Incarnation, ModelName, Term, UpdateId, WeightVersion
from tests.support.otlp_collector import kept_spans
from trainer_agent.agent.spans import trace_rank, traced
from trainer_agent.rank.times import Times as RankTimes
from weightplane.local.v1 import rank_pb2

RUN, ID = "run", UpdateId("u1")


def decided(phase: Phase, times: Times, **more: object) -> UpdateTransaction:
    failed = Outcome(EngineId("e1"), Incarnation("i"), True, None, lost=True, error_reason="PEER_LOST")
    applied = Outcome(EngineId("e0"), Incarnation("i"), True, Stage.APPLIED)
    return UpdateTransaction(
        update_id=ID,
        request_id="r",
        model=ModelName("policy"),
        version=WeightVersion(4, Term(2)),
        term=Term(2),
        step=7,
        plan=Plan(1, ()),
        deadline=0.0,
        phase=phase,
        outcomes={o.engine_id: o for o in (applied, failed)},
        times=times,
        **more,  # type: ignore[arg-type]
    )


def test_a_degraded_update_is_no_error_and_says_who_was_lost() -> None:
    now = time.monotonic()
    with kept_spans() as kept:
        trace_decided(RUN, decided(Phase.DEGRADED, Times(now - 3, now - 1, now)))
    [root], [preparing], [go] = (kept.named(name) for name in ("update", "preparing", "go"))
    assert (root.parent, root.error, root.attributes["weightplane.phase"]) == (None, "", "degraded")
    assert root.ref.span_id == update_span(RUN, ID, UPDATE).span_id
    assert [round((s.end - s.start) / 1e9, 1) for s in (root, preparing, go)] == [3.0, 2.0, 1.0]
    assert {s.parent for s in (preparing, go)} == {root.ref}
    said = {str(e.attributes["weightplane.engine_id"]): e.attributes for e in root.events if e.name == "engine outcome"}
    assert (said["e0"]["weightplane.stage"], said["e1"]["weightplane.stage"]) == ("applied", "lost")
    assert said["e1"]["error.type"] == "PEER_LOST"


def test_after_a_restart_what_is_not_known_is_left_out_and_the_root_is_the_same() -> None:
    now = time.monotonic()
    with kept_spans() as kept:
        trace_decided(RUN, decided(Phase.FAILED, Times(decided=now), cause="the coordinator restarted before go"))
    [root] = kept.records
    assert root.ref.span_id == update_span(RUN, ID, UPDATE).span_id
    assert (root.error, root.error_message) == ("UPDATE_FAILED", "the coordinator restarted before go")
    assert root.attributes["weightplane.restarted"] is True
    assert root.end == root.start


def test_ranks_are_asked_for_their_times_only_while_somebody_wants_them() -> None:
    assert traced(RUN, ID) == ""
    times = RankTimes(rank_pb2.PushPlan(update_id=ID))
    tensors: Iterator[tuple[str, torch.Tensor]] = iter([])
    assert times.source(tensors) is tensors, "nothing is put in between"
    with times.stretch("export"):
        pass
    assert list(times.told(None).stretches) == []
    with kept_spans():
        assert traced(RUN, ID) == f"{update_span(RUN, ID, PUSH).trace_id:032x}"


def test_a_rank_that_fails_says_where() -> None:
    times = RankTimes(rank_pb2.PushPlan(update_id=ID, traced="1"))
    error = LayoutInvalid(problem="another shape", names=["w"])
    with times.stretch("gather"):
        pass
    with pytest.raises(LayoutInvalid), times.stretch("export"):
        raise error
    with kept_spans() as kept:
        trace_rank(RUN, 3, times.told(error))
    rank, gather, export = kept.records
    assert [(s.name, s.error) for s in (rank, gather, export)] == [
        ("rank", "LAYOUT_INVALID"),
        ("gather", ""),
        ("export", "LAYOUT_INVALID"),
    ]
    assert rank.parent is not None
    assert rank.parent.span_id == update_span(RUN, ID, PUSH).span_id
    assert {s.spoken_for for s in kept.records} == {"rank-3"}

"""Who a push waited for when its time was over: the rule, and its words."""

from __future__ import annotations

from trainer_agent.agent import stuck
from weightplane.v1 import engine_pb2, fleet_pb2, version_pb2


def assignment(engine: str, *ranks: int) -> fleet_pb2.Assignment:
    ref = version_pb2.EngineRef(engine_id=engine, incarnation="i")
    return fleet_pb2.Assignment(engine=ref, ranks=ranks, leader=ranks[0])


def stream(engine: str, *ranks: int, announced: int, sent: int, whole: bool, ready: bool = False) -> stuck.Stream:
    return stuck.Stream(assignment(engine, *ranks), announced, whole, sent, ready)


def test_a_rank_that_exported_what_was_read_is_waited_for_with_its_whole_slot() -> None:
    waited = stuck.before_go([stream("e0", 2, 3, announced=40, sent=40, whole=False)], 100)
    assert waited.names == ("rank 2 (exported 40 of 100 bytes)",)
    assert waited.ranks == {2, 3}
    assert waited.engines == ()


def test_an_engine_that_has_bytes_to_read_is_waited_for_though_its_leader_is_not_through_either() -> None:
    waited = stuck.before_go([stream("e0", 0, announced=40, sent=20, whole=False)], 100)
    assert waited.names == ("e0 (20 of 100 bytes sent)",)
    assert [a.engine.engine_id for a in waited.engines] == ["e0"]
    assert waited.ranks == frozenset()


def test_an_engine_that_has_everything_and_is_not_ready_is_waited_for_and_one_that_is_ready_is_not() -> None:
    streams = [
        stream("e0", 0, announced=100, sent=100, whole=True, ready=True),
        stream("e1", 0, announced=100, sent=100, whole=True),
    ]
    assert stuck.before_go(streams, 100).names == ("e1 (100 of 100 bytes sent)",)


def test_one_leader_of_many_engines_is_named_once() -> None:
    streams = [stream(f"e{i}", 0, announced=40, sent=40, whole=False) for i in range(3)]
    assert stuck.before_go(streams, 100).names == ("rank 0 (exported 40 of 100 bytes)",)


def test_after_go_it_is_the_engines_that_have_not_ended() -> None:
    stages = {"e0": engine_pb2.UPDATE_STAGE_APPLIED, "e1": engine_pb2.UPDATE_STAGE_INSTALLING}
    state = fleet_pb2.UpdateState()
    for engine, stage in stages.items():
        state.engines.add(engine=version_pb2.EngineRef(engine_id=engine, incarnation="i"), stage=stage)
    state.engines.add(engine=version_pb2.EngineRef(engine_id="e2", incarnation="i"), lost=True)
    waited = stuck.after_go(state, [assignment(e, 0) for e in ("e0", "e1", "e2")])
    assert waited.names == ("e1 (installing, all bytes sent)",)
    assert [a.engine.engine_id for a in waited.engines] == ["e1"]


def test_the_error_says_so_and_where_nobody_is_left_it_is_the_coordinator() -> None:
    assert str(stuck.Waited(("e1", "e2")).late("push (go)", 3.14)) == "push (go): waited 3.1 s for e1, e2"
    assert str(stuck.Waited(()).late("push (go)", 3)) == "push (go): waited 3 s for the coordinator's decision"

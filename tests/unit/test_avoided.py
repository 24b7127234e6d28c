"""Ways that failed: when a way is given up, for whom, and for how long."""

from __future__ import annotations

import pytest

from controlplane.core.errors import IpcNotPossible, LinkFailed
from trainer_agent.agent.avoided import Avoided
from weightplane.v1 import fleet_pb2, version_pb2, weight_update_pb2

BROADCAST = weight_update_pb2.TRANSPORT_BROADCAST


def plan(*engines: str, incarnation: str = "i") -> list[fleet_pb2.Assignment]:
    refs = [version_pb2.EngineRef(engine_id=e, incarnation=incarnation) for e in engines]
    return [fleet_pb2.Assignment(engine=ref, transport=BROADCAST) for ref in refs]


def link_failed(stage: str, engine_id: str = "e0") -> LinkFailed:
    return LinkFailed(engine_id=engine_id, transport="broadcast", stage=stage, cause="no answer")


def avoided(book: Avoided) -> list[tuple[str, str]]:
    return [(a.engine.engine_id, a.engine.incarnation) for a in book.entries()]


@pytest.mark.parametrize("stage", ["connect", "probe"])
def test_a_link_that_cannot_work_is_given_up_at_once_with_its_cause(stage: str) -> None:
    book = Avoided()
    book.note(link_failed(stage), "u1", plan("e0", "e1"))
    assert avoided(book) == [("e0", "i")]
    (entry,) = book.entries()
    assert entry.transport == BROADCAST
    assert entry.cause == f"the broadcast link to e0 failed ({stage}): no answer"


@pytest.mark.parametrize("stage", ["join", "bytes"])
def test_a_link_that_broke_is_given_up_the_second_time_however_many_say_so_in_one_update(stage: str) -> None:
    book = Avoided()
    for _ in range(3):
        book.note(link_failed(stage), "u1", plan("e0", "e1"))
    assert avoided(book) == []
    book.note(link_failed(stage, "e0, e1"), "u2", plan("e0", "e1"))
    assert avoided(book) == [("e0", "i")], "it is e1's first time"


def test_what_worked_in_between_was_an_accident() -> None:
    book = Avoided()
    book.note(link_failed("bytes"), "u1", plan("e0"))
    book.worked(plan("e0"))
    book.note(link_failed("bytes"), "u3", plan("e0"))
    assert avoided(book) == []


def test_an_engines_next_life_is_given_the_way_again() -> None:
    book = Avoided()
    book.note(link_failed("connect"), "u1", plan("e0"))
    book.lives(a.engine for a in plan("e0"))
    assert avoided(book) == [("e0", "i")]
    book.lives(a.engine for a in plan("e0", incarnation="j"))
    assert avoided(book) == []


def test_memory_of_a_device_that_could_not_be_opened_is_not_offered_again() -> None:
    book = Avoided()
    book.note(IpcNotPossible(engine_id="e0", device_uuid="GPU-1", cause="no peer access"), "u1", plan("e0"))
    assert [a.transport for a in book.entries()] == [weight_update_pb2.TRANSPORT_CUDA_IPC]

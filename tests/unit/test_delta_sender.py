"""Sending deltas: said first, then the one or the other, each chunk once; and what does not do goes whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from controlplane.core.errors import FrameOutOfOrder, LimitExceeded, SlotMismatch
from controlplane.core.layout import DType, Layout, TensorSpec
from trainer_agent.agent.announced import Announced
from trainer_agent.chunking import plan_segment
from trainer_agent.parts import Part
from trainer_agent.rank.exporter import ExportedChunk, Exporter
from trainer_agent.rank.kept import KeptVersions
from trainer_agent.rank.memory import WholeMemory
from trainer_agent.rank.senders.delta import DeltaSender, difference_of
from trainer_agent.rank.senders.port import Announcer, Content
from trainer_agent.segments import SegmentPool
from trainer_agent.transports import INLINE
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, version_pb2, weight_update_pb2

LAYOUT = Layout(tuple(TensorSpec(name, DType.F32, (100,)) for name in "abcd"))
CHUNK_BYTES = 512
BASE = weight_update_pb2.Base(version=version_pb2.WeightVersion(term=1, number=1), content_digest=b"b" * 32)
PART = Part(ranks=(0,), transport=INLINE, engines=(("e0", "life"),), base=BASE)


class Way:
    """What reaches the engines, in order."""

    def __init__(self, said: list[Any]) -> None:
        self.part = PART
        self.said = said

    def send(self, chunk: ExportedChunk) -> None:
        self.said.append(chunk)

    def wait_free(self, index: int) -> None: ...

    def finish(self, content: Content) -> None:
        self.said.append(content)


class Words:
    """In place of an Announcer."""

    def __init__(self, said: list[Any]) -> None:
        self.said = said

    def say(self, request: rank_pb2.RankRequest) -> None:
        self.said.append(request.delta_chosen.delta)


@pytest.fixture
def kept() -> Iterator[KeptVersions]:
    """It has version 1: zeros."""
    versions = KeptVersions(f"sender-{os.getpid()}", 0)
    versions.acquire(plan_segment(LAYOUT, CHUNK_BYTES).byte_count)
    versions.settle(True, BASE)
    yield versions
    versions.close()


def push(kept: KeptVersions, changed: int, part: Part = PART) -> tuple[list[Any], list[ExportedChunk]]:
    """Export a version of which so many elements of each tensor changed. What was said, and the whole chunks."""
    plan, said, whole = plan_segment(LAYOUT, CHUNK_BYTES), list[Any](), []
    segment = kept.acquire(plan.byte_count)
    difference = difference_of(kept, [part], segment, LAYOUT, plan, CHUNK_BYTES)
    sender = DeltaSender(part, Way(said), cast(Announcer, Words(said)), difference)
    exporter = Exporter(LAYOUT, plan, WholeMemory(plan, segment.memory))
    tensors = ((t.name, torch.cat([torch.ones(changed), torch.zeros(100 - changed)])) for t in LAYOUT.tensors)
    for chunk in exporter.chunks(tensors):
        if difference is not None:
            difference.take(chunk)
        whole.append(chunk)
        sender.send(chunk)
    sender.finish(Content(len(plan.chunks), exporter.byte_count, exporter.content_digest))
    return said, whole


def test_what_changed_is_said_to_come_and_ends_with_an_empty_chunk(kept: KeptVersions) -> None:
    said, _ = push(kept, 3)
    chosen, *chunks, content = said
    assert chosen is True
    assert [c.index for c in chunks] == list(range(len(chunks)))
    assert [r.changed_elements for c in chunks for r in c.records] == [3] * 4
    assert (chunks[-1].records, chunks[-1].byte_count) == ((), 0)
    assert (content.chunk_count, content.byte_count) == (len(chunks), 4 * 3 * 8)


def test_what_is_not_worth_it_goes_whole_each_chunk_once_and_from_then_on(kept: KeptVersions) -> None:
    said, whole = push(kept, 90)
    chosen, *chunks, content = said
    assert chosen is False
    assert chunks == whole
    assert (content.chunk_count, content.byte_count) == (len(whole), LAYOUT.byte_count)


def test_inv5_engines_that_hold_another_base_than_the_rank_has_get_everything(kept: KeptVersions) -> None:
    other = weight_update_pb2.Base(version=BASE.version, content_digest=b"o" * 32)
    said, whole = push(kept, 3, Part(ranks=(0,), transport=INLINE, engines=(("e0", "life"),), base=other))
    assert said[:-1] == [False, *whole]
    assert difference_of(SegmentPool("run", 0), [PART], cast(Any, None), LAYOUT, cast(Any, None), 1) is None


def test_without_room_for_the_difference_everything_goes(kept: KeptVersions, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(byte_count: int) -> Any:
        raise LimitExceeded(what="bytes free", limit=0, got=byte_count)

    monkeypatch.setattr(kept, "place", full)
    said, whole = push(kept, 3)
    assert said[:-1] == [False, *whole]


# ---- what the agent takes ----


def announced() -> Announced:
    plan = rank_pb2.PushPlan(keep_whole=True)
    for engine_id, base in (("e0", BASE), ("e1", None)):
        engine = version_pb2.EngineRef(engine_id=engine_id, incarnation="life")
        plan.assignments.append(fleet_pb2.Assignment(engine=engine, leader=0, ranks=[0], transport=INLINE, base=base))
    return Announced(plan, lambda rank, chunk: None)


def chosen(*engine_ids: str, delta: bool = True) -> rank_pb2.DeltaChosen:
    return rank_pb2.DeltaChosen(engine_ids=engine_ids, delta=delta)


def test_a_chunk_before_the_choice_a_second_choice_and_one_that_nobody_asked_for_are_refused() -> None:
    said = announced()
    with pytest.raises(FrameOutOfOrder):
        said.take_chunk(0, rank_pb2.SendChunk(engine_ids=["e0"], index=0))
    said.take_choice(0, chosen("e0"))
    for engine_id in ("e0", "e1"):
        with pytest.raises(FrameOutOfOrder):
            said.take_choice(0, chosen(engine_id))
    with pytest.raises(SlotMismatch):
        said.take_choice(1, chosen("e0"))


def test_a_delta_is_never_taken_for_the_whole_version() -> None:
    said = announced()
    said.take_choice(0, chosen("e0"))
    end = rank_pb2.PushEnd(chunk_count=1, content_digest=b"d" * 32)
    for engine_ids in (["e0"], []):
        assert said.whole is None
        said.take_chunk(0, rank_pb2.SendChunk(engine_ids=engine_ids, index=0))
        end.engine_ids[:] = engine_ids
        said.take_end(0, end)
    assert said.whole is not None, "what the leader announced for the agent alone"

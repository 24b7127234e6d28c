"""A ring of two chunks: what is exported through it, and when a half may be written again (INV-12)."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.errors import SlotMismatch
from controlplane.core.layout import DType, Layout, TensorSpec, content_digest
from trainer_agent import parts
from trainer_agent.agent.announced import Announced
from trainer_agent.agent.chunk_log import MAX_CHUNKS, ChunkLog
from trainer_agent.agent.plans import for_rank
from trainer_agent.agent.ways import ByDevice
from trainer_agent.chunking import FIRST_BYTES, SegmentPlan, plan_segment
from trainer_agent.parts import keep_two, keeps_whole, parts_of
from trainer_agent.rank.exporter import Exporter, copy_elements
from trainer_agent.rank.feed import chunks_of
from trainer_agent.rank.memory import COPIED_BYTES, RingMemory, ring_bytes
from trainer_agent.transports import BROADCAST, CUDA_IPC, INLINE, SHARED_MEMORY, TRAITS, traits_of
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, version_pb2, weight_update_pb2

# ---- the rank's side ----


class Readers:
    """Reads a chunk at the last moment that the ring gives it: when the exporter asks whether it is free."""

    def __init__(self, plan: SegmentPlan, memory: bytearray) -> None:
        self.ring = RingMemory(plan, memoryview(memory), self.wait_free)
        self.waiting: dict[int, tuple[int, int]] = {}
        self.read: list[bytes] = []
        self._memory = memory

    def wait_free(self, index: int) -> None:
        start, size = self.waiting.pop(index)
        self.read.append(bytes(self._memory[start : start + size]))


@given(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=30), limit=st.sampled_from([64, 128, 256, 1024]))
def test_a_reader_as_late_as_the_ring_allows_gets_every_byte(sizes: list[int], limit: int) -> None:
    tensors = [(f"t{i}", torch.randint(0, 256, (n,), dtype=torch.uint8)) for i, n in enumerate(sizes)]
    layout = Layout(tuple(TensorSpec(n, DType.U8, tuple(t.shape)) for n, t in tensors))
    plan = plan_segment(layout, limit)
    readers = Readers(plan, bytearray(ring_bytes(plan)))
    exporter, got = Exporter(layout, plan, readers.ring), [bytearray(n) for n in sizes]
    chunks = []
    for chunk in exporter.chunks(iter(tensors)):
        readers.waiting[chunk.index] = (chunk.start, chunk.byte_count)
        chunks.append(chunk)
    for index in sorted(readers.waiting):
        readers.wait_free(index)
    for chunk, data in zip(chunks, readers.read, strict=True):
        for r in chunk.records:
            got[r.tensor][r.tensor_offset : r.tensor_offset + r.byte_count] = data[r.buffer_offset :][: r.byte_count]
    assert [bytes(g) for g in got] == [t.numpy().tobytes() for _, t in tensors]
    assert exporter.content_digest == content_digest([xxhash.xxh3_64_digest(t.numpy().tobytes()) for _, t in tensors])


@pytest.mark.parametrize(
    ("transports", "whole", "first", "largest"),
    [
        ([INLINE, INLINE], False, FIRST_BYTES, COPIED_BYTES),
        ([INLINE, BROADCAST], False, FIRST_BYTES, 64 << 20),
        ([BROADCAST], False, FIRST_BYTES, 64 << 20),
        ([INLINE], True, 64 << 20, 64 << 20),
    ],
)
def test_chunks_that_travel_begin_small_and_those_that_are_copied_out_of_a_ring_stay_small(
    transports: list[weight_update_pb2.Transport.ValueType], whole: bool, first: int, largest: int
) -> None:
    layout = Layout((TensorSpec("a", DType.U8, (300 << 20,)), TensorSpec("b", DType.U8, (7,))))
    plan = plan_of([(0, t) for t in transports], 64 << 20)
    plan.keep_whole = whole
    sizes = [c.end - c.start for c in chunks_of(layout, plan, 0).chunks]
    assert (sizes[0], max(sizes)) == (first, largest)
    plan.chunk_bytes = 1 << 20
    assert chunks_of(layout, plan, 0).chunks[0].end == 1 << 20


@given(
    feeds=st.lists(
        st.tuples(st.sets(st.integers(0, 4), min_size=1, max_size=3), st.sampled_from(sorted(TRAITS))), max_size=6
    ),
    whole=st.booleans(),
    chunk_bytes=st.sampled_from([1 << 20, 16 << 20, 64 << 20]),
)
def test_ranks_that_hand_each_other_chunks_cut_alike_whatever_else_each_of_them_is_told_to_feed(
    feeds: list[tuple[set[int], weight_update_pb2.Transport.ValueType]], whole: bool, chunk_bytes: int
) -> None:
    """Each from its own part of the plan, which is all that it is told; and the agent counts on the same of each."""
    layout = Layout((TensorSpec("a", DType.U8, (300 << 20,)), TensorSpec("b", DType.U8, (7,))))
    plan = push_plan(*((f"e{i}", sorted(r), t) for i, (r, t) in enumerate(feeds)), keep_whole=whole)
    plan.chunk_bytes = chunk_bytes
    told = {rank: for_rank(plan, rank, 1) for rank in range(5)}
    for a in plan.assignments:
        if traits_of(a.transport).by_slot:
            assert len({chunks_of(layout, told[r], r) for r in a.ranks}) == 1
    assert [keeps_whole(told[r], r) for r in told] == [keeps_whole(plan, r) for r in told]
    assert keep_two(plan) == {a.leader for a in plan.assignments if not keeps_whole(plan, a.leader)}
    assert [parts_of(told[r], r) for r in told] == [parts_of(plan, r) for r in told]


def plan_of(feeds: list[tuple[int, weight_update_pb2.Transport.ValueType]], chunk_bytes: int) -> rank_pb2.PushPlan:
    """`feeds`: by engine, the rank that feeds it, and how."""
    engines = [version_pb2.EngineRef(engine_id=f"e{i}", incarnation="life") for i in range(len(feeds))]
    asked = [
        fleet_pb2.Assignment(engine=engine, ranks=[rank], leader=rank, transport=way, device_uuids=["d"])
        for engine, (rank, way) in zip(engines, feeds, strict=True)
    ]
    return rank_pb2.PushPlan(chunk_bytes=chunk_bytes, assignments=asked)


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    cut=st.integers(1, 40),
)
def test_a_tensor_in_any_memory_order_is_copied_in_logical_order_by_any_pieces(
    shape: list[int], order: object, cut: int
) -> None:
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    axes = list(range(len(shape)))
    order.shuffle(axes)  # type: ignore[attr-defined]
    tensor = whole.permute(axes)
    target = torch.empty(tensor.numel(), dtype=torch.int32)
    for first in range(0, tensor.numel(), cut):
        copy_elements(tensor, first, target[first : first + cut])
    assert torch.equal(target, tensor.reshape(-1))


# ---- the plan's side ----


def push_plan(*assignments: tuple[str, list[int], int], keep_whole: bool = False) -> rank_pb2.PushPlan:
    plan = rank_pb2.PushPlan(keep_whole=keep_whole)
    for engine_id, ranks, transport in assignments:
        ref = version_pb2.EngineRef(engine_id=engine_id, incarnation="i")
        plan.assignments.add(
            engine=ref, ranks=ranks, leader=ranks[0], transport=transport, device_uuids=[f"d{r}" for r in ranks]
        )
    return plan


def test_memory_is_whole_only_where_somebody_reads_it_whole() -> None:
    assert not keeps_whole(push_plan(("e0", [0], INLINE), ("e1", [0], BROADCAST)), 0)
    assert keeps_whole(push_plan(("e0", [0], INLINE), ("e1", [0], SHARED_MEMORY)), 0)
    assert keeps_whole(push_plan(("e0", [0], INLINE), keep_whole=True), 0)


def test_ranks_that_do_not_lead_export_only_where_they_hand_memory_out() -> None:
    plan = push_plan(("e0", [0, 1], INLINE), ("e1", [0, 1], SHARED_MEMORY), ("e2", [0, 1], BROADCAST))
    assert [p.transport for p in parts_of(plan, 1)] == [SHARED_MEMORY]
    assert sorted(p.transport for p in parts_of(plan, 0)) == sorted([INLINE, SHARED_MEMORY, BROADCAST])


def test_engines_of_one_link_are_one_part_whose_slots_they_may_be() -> None:
    """A link has one order of members, and each chunk goes over it once."""
    plan = push_plan(("e0", [0, 1], BROADCAST), ("e1", [0], BROADCAST), ("e2", [0, 1, 2], BROADCAST))
    for a in plan.assignments:
        a.link = "0/shared"
    (part,) = parts_of(plan, 0)
    assert (part.engine_ids, part.ranks) == (("e0", "e1", "e2"), (0,))
    assert parts_of(plan, 1) == []


# ---- the agent's side ----


def announced(plan: rank_pb2.PushPlan) -> tuple[Announced, list[tuple[int, int]]]:
    released: list[tuple[int, int]] = []
    return Announced(plan, lambda rank, chunk: released.append((rank, chunk))), released


async def test_inv12_a_chunk_is_released_when_the_slowest_of_its_readers_has_read_it() -> None:
    said, released = announced(push_plan(("e0", [0], INLINE), ("e1", [0], INLINE), ("e2", [1], INLINE)))
    said.logs["e0"].mark_read(0)
    said.logs["e0"].mark_read(1)
    assert released == []
    said.logs["e1"].mark_read(0)
    assert released == [(0, 0)]
    said.logs["e2"].mark_read(0)
    assert released == [(0, 0), (1, 0)]


@given(reads=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40), over=st.sets(st.integers(0, 3)))
def test_inv12_whatever_the_order_in_which_streams_read_on_the_slowest_of_them_is_waited_for(
    reads: list[tuple[int, int]], over: set[int]
) -> None:
    async def read_on() -> None:
        said, released = announced(push_plan(*((f"e{i}", [0], INLINE) for i in range(4))))
        logs, told = list(said.logs.values()), []
        for stream, chunk in [*reads, *((stream, None) for stream in sorted(over))]:
            before = min(log.read for log in logs)
            logs[stream].mark_over() if chunk is None else logs[stream].mark_read(chunk)
            if before < (least := min(log.read for log in logs)) < MAX_CHUNKS:
                told.append((0, least))
            assert released == told

    asyncio.run(read_on())


def test_what_is_made_of_a_plan_grows_with_its_engines_and_not_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Mock(side_effect=traits_of)
    monkeypatch.setattr(parts, "traits_of", asked)

    def looks(engines: int) -> int:
        asked.reset_mock()
        announced(push_plan(*((f"e{i}", [i % 50], SHARED_MEMORY) for i in range(engines))))
        return asked.call_count

    assert looks(800) == 8 * looks(100)


async def test_inv12_a_half_of_device_memory_is_released_to_every_rank_when_all_workers_have_let_go() -> None:
    """A rank of two slots writes one half for both: what only one of them has read is not free."""
    plan = push_plan(("e0", [0, 1], CUDA_IPC), ("e1", [1], CUDA_IPC), ("e2", [2], SHARED_MEMORY))
    said, released = announced(plan)
    said.logs["e0"].mark_read(0)
    said.logs["e2"].mark_read(0)
    assert released == [(0, 0)]
    said.logs["e1"].mark_read(0)
    assert released == [(0, 0), (1, 0)]
    said.logs["e1"].mark_over()
    said.logs["e0"].mark_read(1)
    assert released == [(0, 0), (1, 0), (0, 1), (1, 1)]


async def test_a_rank_waits_for_no_engine_that_reads_none_of_its_memory() -> None:
    """Their ranks' chunks may be others: here rank 1's are small, and whoever waited for the second of rank 0's large
    ones would keep rank 0 from the tensors that it needs for the first."""
    said, released = announced(push_plan(("e0", [0], CUDA_IPC), ("e1", [1], INLINE)))
    said.logs["e1"].mark_read(0)
    said.logs["e1"].mark_read(1)
    assert released == [(1, 0), (1, 1)]
    said.logs["e0"].mark_read(0)
    assert released == [(1, 0), (1, 1), (0, 0)]


async def test_inv12_a_handle_that_went_out_frees_nothing_and_the_engines_word_does() -> None:
    log = ChunkLog(ring=True)
    way = ByDevice(fleet_pb2.Assignment(), log)
    way.sent(0)
    assert log.read == -1
    way.let_go(0)
    assert log.read == 0


async def test_a_stream_that_is_over_holds_nobody_up_and_a_broadcast_one_never_does() -> None:
    said, released = announced(push_plan(("e0", [0], INLINE), ("e1", [0], INLINE), ("e2", [0], BROADCAST)))
    said.logs["e0"].mark_read(3)
    said.logs["e1"].mark_over()
    assert released == [(0, 3)]


async def test_whole_memory_is_not_released_chunk_by_chunk() -> None:
    said, released = announced(push_plan(("e0", [0], INLINE), keep_whole=True))
    said.logs["e0"].mark_read(0)
    assert released == []


@pytest.mark.parametrize(("ring", "read", "again"), [(True, -1, True), (True, 0, False), (False, 5, True)])
async def test_a_stream_begins_anew_only_while_its_first_chunk_is_certainly_there(
    ring: bool, read: int, again: bool
) -> None:
    log = ChunkLog(ring=ring)
    log.mark_read(read)
    assert log.again is again


async def test_a_link_is_made_by_the_leader_of_its_engines_alone() -> None:
    said, _ = announced(push_plan(("e0", [0], BROADCAST), ("e1", [1], BROADCAST)))
    said.check_link(0, rank_pb2.LinkMade(engine_ids=["e0"]))
    with pytest.raises(SlotMismatch, match="who leads"):
        said.check_link(0, rank_pb2.LinkMade(engine_ids=["e0", "e1"]))

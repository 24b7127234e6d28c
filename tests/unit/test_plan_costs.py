"""What a plan costs: bytes that leave each rank, and memory on both sides."""

from __future__ import annotations

import pytest

from controlplane.core.plan import EnginePlace, LinkFate, Load, Plan, RankPlace, Transport
from controlplane.core.plan_costs import EngineCost, SenderCost, Sent, engine_costs, sender_costs
from controlplane.core.planner import Ways, make_plan
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank

ALL = frozenset(Transport) - {Transport.CHECKPOINT}
LOAD = Load(tensor_count=9, byte_count=1000, chunk_bytes=100, largest_module_bytes=300)
RANKS = [RankPlace(Rank(n), "h0", DeviceUuid(f"d{n}")) for n in range(3)]


def engine(
    name: str, *devices: str, host: str = "h0", transports: frozenset[Transport] = ALL, streaming: bool = False
) -> EnginePlace:
    uuids = tuple(DeviceUuid(d) for d in devices)
    where = (EngineId(name), Incarnation("i"), f"{name}:1", host, uuids)
    return EnginePlace(*where, transports=transports, streaming=streaming)


def plan(engines: list[EnginePlace], ranks: list[RankPlace] = RANKS, **ways: object) -> Plan:
    return make_plan(1, engines, frozenset(), ranks, Ways(**ways))  # type: ignore[arg-type]


def sent(transport: Transport, byte_count: int, *names: str) -> Sent:
    return Sent(transport, tuple(map(EngineId, names)), byte_count)


def test_a_rank_that_shares_memory_writes_the_version_once_for_all_who_map_it() -> None:
    made = plan([engine("e0", "f0"), engine("e1", "f1")], RANKS[:1])
    assert sender_costs(made, LOAD) == (
        SenderCost(Rank(0), (sent(Transport.SHARED_MEMORY, 1000, "e0", "e1"),), 1000, 0),
    )
    assert [c.staging_bytes for c in engine_costs(made, LOAD)] == [0, 0]


def test_every_rank_of_a_slot_shares_its_memory_with_the_worker_on_its_device() -> None:
    costs = sender_costs(plan([engine("wide", "d2", "d0")]), LOAD)
    assert [(c.rank, c.memory_bytes) for c in costs] == [(0, 1000), (2, 1000)]


def test_inline_leaves_the_leader_once_for_each_engine_from_two_chunks_and_is_staged_whole() -> None:
    engines = [engine("wide", "d0", "d1"), engine("e1", "f1"), engine("e2", "f2"), engine("e3", "f3")]
    made = plan(engines, forced=Transport.INLINE)
    assert sender_costs(made, LOAD) == (
        SenderCost(Rank(0), (sent(Transport.INLINE, 2000, "e3", "wide"),), 200, 0),
        SenderCost(Rank(1), (sent(Transport.INLINE, 1000, "e1"),), 200, 0),
        SenderCost(Rank(2), (sent(Transport.INLINE, 1000, "e2"),), 200, 0),
    )
    assert engine_costs(made, LOAD)[0] == EngineCost(EngineId("e1"), staging_bytes=1000, loading_bytes=300)


@pytest.mark.parametrize(("fate", "leaving"), [(LinkFate.SHARED, 1000), (LinkFate.PER_ENGINE, 2000)])
def test_a_broadcast_leaves_the_leader_once_for_each_link(fate: LinkFate, leaving: int) -> None:
    made = plan([engine("e0", "f0", host="h9"), engine("e1", "f1", host="h9")], RANKS[:1], sends=ALL, fate=fate)
    assert sender_costs(made, LOAD) == (SenderCost(Rank(0), (sent(Transport.BROADCAST, leaving, "e0", "e1"),), 200, 0),)


def test_one_engine_that_maps_memory_makes_its_sender_keep_the_whole_version() -> None:
    made = plan([engine("far", "f0", host="h9"), engine("near", "f1")], RANKS[:1], sends=ALL)
    (cost,) = sender_costs(made, LOAD)
    assert [s.transport for s in cost.sent] == [Transport.SHARED_MEMORY, Transport.BROADCAST]
    assert cost.memory_bytes == 1000


def test_device_memory_is_two_chunks_and_what_is_loaded_the_largest_module_too() -> None:
    made = plan([engine("e0", "d0", streaming=True)], sends=ALL)
    assert sender_costs(made, LOAD) == (SenderCost(Rank(0), (sent(Transport.CUDA_IPC, 1000, "e0"),), 200, 200),)
    assert engine_costs(made, LOAD) == (EngineCost(EngineId("e0"), staging_bytes=0, loading_bytes=500),)


def test_a_version_smaller_than_a_chunk_needs_no_more_than_itself_twice() -> None:
    (cost,) = sender_costs(plan([engine("e0", "d0")], forced=Transport.INLINE), Load(1, 30, 100, 30))
    assert cost.memory_bytes == 60


def test_where_nothing_was_stated_nothing_is_made_up() -> None:
    made = plan([engine("e0", "d0"), engine("e1", "f1", host="h9")])
    assert {c.memory_bytes for c in sender_costs(made, None)} == {None}
    assert {s.byte_count for c in sender_costs(made, None) for s in c.sent} == {None}
    assert {(c.staging_bytes, c.loading_bytes) for c in engine_costs(made, None)} == {(None, None)}

"""Slots from device UUIDs: who leads, who sends to engines on devices of their own, and who fits nowhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.errors import EngineMisfit
from controlplane.core.plan import EnginePlace, Plan, RankPlace, Transport
from controlplane.core.planner import Ways, check_fit, make_plan
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank


def rank(number: int, device: str, host: str = "h0") -> RankPlace:
    return RankPlace(Rank(number), host, DeviceUuid(device))


def engine(name: str, *devices: str, host: str = "h0", life: str = "i") -> EnginePlace:
    return EnginePlace(EngineId(name), Incarnation(life), f"{name}:1", host, tuple(DeviceUuid(d) for d in devices))


def plan(engines: list[EnginePlace], ranks: list[RankPlace], forced: Transport | None = None) -> Plan:
    return make_plan(1, engines, frozenset(e.engine_id for e in engines), ranks, Ways(forced=forced))


def test_g1_the_lowest_rank_of_a_slot_leads_whatever_order_its_devices_are_in() -> None:
    made = plan([engine("tp2", "d3", "d1")], [rank(n, f"d{n}") for n in range(4)])
    (only,) = made.assignments
    assert (only.ranks, only.leader, only.device_uuids) == ((1, 3), 1, ("d1", "d3"))


def test_g9_slots_are_matched_by_uuid_and_never_by_index() -> None:
    made = plan([engine("e0", "GPU-b"), engine("e1", "GPU-a")], [rank(0, "GPU-a"), rank(1, "GPU-b")])
    assert [(a.engine.engine_id, a.ranks) for a in made.assignments] == [("e0", (1,)), ("e1", (0,))]


def test_engines_of_different_sizes_share_one_plan() -> None:
    ranks = [rank(n, f"d{n}") for n in range(4)]
    made = plan([engine("wide", "d0", "d1"), engine("a", "d2"), engine("b", "d3")], ranks)
    assert [a.ranks for a in made.assignments] == [(2,), (3,), (0, 1)]


def test_engines_on_devices_of_their_own_are_dealt_to_ranks_of_their_host_first() -> None:
    ranks = [rank(0, "d0", "h0"), rank(1, "d1", "h1"), rank(2, "d2", "h1")]
    made = plan([engine("x", "f0", host="h1"), engine("y", "f1", host="h1"), engine("z", "f2", host="h2")], ranks)
    assert [(a.ranks, a.transport) for a in made.assignments] == [
        ((1,), Transport.SHARED_MEMORY),
        ((2,), Transport.SHARED_MEMORY),
        ((0,), Transport.INLINE),
    ]
    assert all(a.device_uuids == ("",) for a in made.assignments)


def test_a_forced_transport_is_taken_and_said() -> None:
    (only,) = plan([engine("e", "d0")], [rank(0, "d0")], Transport.INLINE).assignments
    assert only.transport is Transport.INLINE
    assert "asked for" in only.reason


def test_some_but_not_all_devices_is_a_misfit_with_numbers_and_uuids() -> None:
    with pytest.raises(EngineMisfit) as refusal:
        check_fit(engine("e", "d0", "d9", "d8"), [rank(0, "d0")])
    assert (refusal.value.held, refusal.value.total, refusal.value.missing) == (1, 3, ["d8", "d9"])


@given(order=st.permutations(range(5)))
def test_g5_every_order_of_hellos_gives_the_same_plan_and_digest(order: list[int]) -> None:
    engines, ranks = [engine(f"e{n}", f"d{n}") for n in range(5)], [rank(n, f"d{n}") for n in range(5)]
    shuffled = plan([engines[n] for n in order], [ranks[n] for n in order])
    assert shuffled == plan(engines, ranks)
    assert shuffled.digest == plan(engines, ranks).digest


def test_the_digest_changes_with_a_life_a_slot_or_a_transport() -> None:
    ranks = [rank(0, "d0"), rank(1, "d1")]
    digests = {
        plan([engine("e", "d0")], ranks).digest,
        plan([engine("e", "d0", life="j")], ranks).digest,
        plan([engine("e", "d1")], ranks).digest,
        plan([engine("e", "d0")], ranks, Transport.INLINE).digest,
    }
    assert len(digests) == 4

"""What holds for the plan of every fleet: any sizes of engines, on the trainer's devices, beside them or far away."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from controlplane.core.engine_state import Held
from controlplane.core.errors import EngineMisfit
from controlplane.core.names import natural_key
from controlplane.core.plan import BY_REFERENCE, EnginePlace, LinkFate, Load, Plan, RankPlace, Transport
from controlplane.core.plan_costs import engine_costs, sender_costs
from controlplane.core.planner import Ways, check_fit, make_plan
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank, Term, WeightVersion

BASE = Held(WeightVersion(6, Term(1)), b"b" * 32)
SENT = frozenset(Transport) - {Transport.CHECKPOINT}
LOAD = Load(tensor_count=9, byte_count=1000, chunk_bytes=100, largest_module_bytes=300)


@dataclass(frozen=True)
class Fleet:
    ranks: tuple[RankPlace, ...]
    engines: tuple[EnginePlace, ...]
    ways: Ways

    def plan(self) -> Plan:
        return make_plan(3, self.engines, frozenset(), self.ranks, self.ways)


def engine(name: str, host: str, devices: list[str], transports: frozenset[Transport]) -> EnginePlace:
    uuids = tuple(map(DeviceUuid, devices))
    return EnginePlace(EngineId(name), Incarnation("i"), f"{name}:1", host, uuids, transports=transports)


_SETS = [frozenset({Transport.INLINE, *more}) for n in range(4) for more in combinations(sorted(SENT, key=str), n)]
_WAYS = st.sampled_from(_SETS)


@st.composite
def fleets(draw: st.DrawFn, far_only: bool = False) -> Fleet:
    """Ranks on one or two hosts; engines of sizes from 1 to all of a host's ranks on their devices, in any order of
    these; and engines on devices of their own, on hosts with ranks and without."""
    hosts = ["h0", "h1"][: draw(st.integers(1, 2))]
    devices = [(host, f"CPU-{host}-{i}") for i in range(draw(st.integers(1, 4))) for host in hosts]
    chance = draw(st.randoms(use_true_random=False))
    chance.shuffle(devices)
    ranks = tuple(RankPlace(Rank(n), h, DeviceUuid(d)) for n, (h, d) in enumerate(devices))
    places = [] if far_only else [place for host in hosts for place in _slots(draw, chance, host, devices)]
    near = [] if far_only else hosts
    places += [(chance.choice([*near, "far"]), [f"own-{i}"]) for i in range(draw(st.integers(not places, 6)))]
    made = tuple(engine(f"e{i}", h, d, chance.choice(_SETS)) for i, (h, d) in enumerate(places))
    return Fleet(ranks, made, _ways(draw, chance, made))


def _slots(
    draw: st.DrawFn, chance: random.Random, host: str, devices: list[tuple[str, str]]
) -> Iterator[tuple[str, list[str]]]:
    left = [d for h, d in devices if h == host]
    chance.shuffle(left)
    for size in draw(st.lists(st.integers(1, 4), max_size=3)):
        if left[:size]:
            yield host, left[:size]
        left = left[size:]


def _ways(draw: st.DrawFn, chance: random.Random, engines: tuple[EnginePlace, ...]) -> Ways:
    failed = [(e.engine_id, e.incarnation, t) for e in engines for t in SENT if chance.random() < 0.2]
    return Ways(
        sends=draw(_WAYS),
        forced=draw(st.none() | st.sampled_from(sorted(SENT, key=str))),
        fate=draw(st.sampled_from(LinkFate)),
        avoid=dict.fromkeys(failed, "it broke"),
        base=BASE,
        holders=frozenset(e.engine_id for e in engines if chance.random() < 0.7),
    )


@settings(max_examples=40)
@given(fleet=fleets())
def test_every_engine_is_in_the_plan_exactly_once_and_in_the_order_of_names(fleet: Fleet) -> None:
    planned = [a.engine for a in fleet.plan().assignments]
    assert sorted(planned, key=lambda p: natural_key(p.engine_id)) == planned
    assert Counter(p.engine_id for p in planned) == Counter(e.engine_id for e in fleet.engines)


@settings(max_examples=40)
@given(fleet=fleets())
def test_g1_the_leader_is_the_lowest_of_the_ranks_that_hold_the_engines_devices(fleet: Fleet) -> None:
    device = {r.rank: r.device_uuid for r in fleet.ranks}
    for a in fleet.plan().assignments:
        assert list(a.ranks) == sorted(set(a.ranks))
        assert a.leader == min(a.ranks)
        if a.device_uuids != ("",):
            assert [device[r] for r in a.ranks] == list(a.device_uuids)


@settings(max_examples=40)
@given(fleet=fleets())
def test_g2_every_device_of_a_colocated_engine_has_a_rank_and_no_other_engine_claims_to_be_one(fleet: Fleet) -> None:
    held = {r.device_uuid for r in fleet.ranks}
    for a in fleet.plan().assignments:
        colocated = set(a.engine.device_uuids) <= held
        assert set(a.device_uuids) == (set(a.engine.device_uuids) if colocated else {""})
        assert colocated or len(a.ranks) == 1


@settings(max_examples=40)
@given(fleet=fleets(), drop=st.integers(0, 63))
def test_g4_an_engine_that_lost_some_of_its_devices_to_another_size_is_refused_with_both_numbers(
    fleet: Fleet, drop: int
) -> None:
    wide = [e for e in fleet.engines if len(e.device_uuids) > 1]
    assume(wide)
    gone = wide[0].device_uuids[drop % len(wide[0].device_uuids)]
    ranks = [r for r in fleet.ranks if r.device_uuid != gone]
    with pytest.raises(EngineMisfit) as refusal:
        check_fit(wide[0], ranks)
    total = len(wide[0].device_uuids)
    assert (refusal.value.held, refusal.value.total, refusal.value.missing) == (total - 1, total, [gone])


@settings(max_examples=40)
@given(fleet=fleets(), seed=st.integers())
def test_g5_plan_and_digest_do_not_depend_on_who_came_first(fleet: Fleet, seed: int) -> None:
    required = frozenset(e.engine_id for e in fleet.engines)
    first = make_plan(3, fleet.engines, required, fleet.ranks, fleet.ways)
    ranks, engines = list(fleet.ranks), list(fleet.engines)
    random.Random(seed).shuffle(ranks)
    random.Random(seed).shuffle(engines)
    second = make_plan(3, engines, required, ranks, fleet.ways)
    assert (second, second.digest) == (first, first.digest)


@settings(max_examples=40)
@given(fleet=fleets(far_only=True))
def test_engines_far_away_are_dealt_so_that_no_rank_has_two_more_than_another(fleet: Fleet) -> None:
    loads = Counter({r.rank: 0 for r in fleet.ranks})
    loads.update(a.leader for a in fleet.plan().assignments if a.leader is not None)
    assert max(loads.values()) - min(loads.values()) <= 1


@settings(max_examples=40)
@given(fleet=fleets())
def test_an_engine_beside_ranks_is_fed_from_its_host_and_never_by_the_busier_of_two_of_them(fleet: Fleet) -> None:
    """Each of them in its turn: what came later is not counted."""
    host = {r.rank: r.host_id for r in fleet.ranks}
    assignments = fleet.plan().assignments
    loads = Counter(a.leader for a in assignments if a.device_uuids != ("",))
    for a in assignments:
        if a.device_uuids != ("",):
            continue
        near = [r for r, h in host.items() if h == a.engine.host_id] or list(host)
        assert a.leader in near
        assert loads[a.leader] == min(loads[r] for r in near)
        loads[a.leader] += 1


@settings(max_examples=40)
@given(fleet=fleets())
def test_no_way_is_taken_that_a_side_lacks_or_that_failed_while_another_is_left(fleet: Fleet) -> None:
    host = {r.rank: r.host_id for r in fleet.ranks}
    for a in fleet.plan().assignments:
        if a.transport is Transport.INLINE:
            continue
        assert a.transport in a.engine.transports & fleet.ways.sends
        assert (a.engine.engine_id, a.engine.incarnation, a.transport) not in fleet.ways.avoid
        if a.transport in BY_REFERENCE:
            assert {host[r] for r in a.ranks} == {a.engine.host_id}
        if a.transport is Transport.CUDA_IPC:
            assert set(a.device_uuids) == set(a.engine.device_uuids)


@settings(max_examples=40)
@given(fleet=fleets())
def test_a_link_has_one_leader_and_one_fate_and_a_base_for_all_or_none(fleet: Fleet) -> None:
    links: dict[str, list[object]] = {}
    for a in fleet.plan().assignments:
        assert bool(a.link) == (a.transport is Transport.BROADCAST) == (a.fate is not None)
        if a.link:
            links.setdefault(a.link, []).append((a.leader, a.fate, a.base))
    for members in links.values():
        assert all(one == other for one, other in pairwise(members))


@settings(max_examples=40)
@given(fleet=fleets())
def test_inv5_a_base_is_only_given_where_it_is_held_and_one_rank_sends(fleet: Fleet) -> None:
    for a in fleet.plan().assignments:
        if a.base is not None:
            assert (a.base, a.engine.engine_id in fleet.ways.holders, len(a.ranks)) == (BASE, True, 1)
            assert a.transport not in BY_REFERENCE


@settings(max_examples=40)
@given(fleet=fleets())
def test_what_leaves_the_ranks_is_what_reaches_the_engines(fleet: Fleet) -> None:
    plan = fleet.plan()
    senders = sender_costs(plan, LOAD)
    assert [c.rank for c in senders] == sorted({c.rank for c in senders})
    reached = Counter(name for c in senders for s in c.sent for name in s.engine_ids)
    for a, cost in zip(plan.assignments, engine_costs(plan, LOAD), strict=True):
        assert cost.engine_id == a.engine.engine_id
        assert reached[cost.engine_id] == (len(a.ranks) if a.transport in BY_REFERENCE else 1)
    for c in senders:
        for s in c.sent:
            assert s.byte_count is not None
            assert LOAD.byte_count <= s.byte_count <= LOAD.byte_count * len(s.engine_ids)


@settings(max_examples=40)
@given(fleet=fleets())
def test_g9_a_plan_knows_devices_by_name_alone_and_not_by_place_in_a_list(fleet: Fleet) -> None:
    renumbered = [replace(e, device_uuids=tuple(reversed(e.device_uuids))) for e in fleet.engines]
    before = {a.engine.engine_id: (a.ranks, a.device_uuids) for a in fleet.plan().assignments}
    after = make_plan(3, renumbered, frozenset(), fleet.ranks, fleet.ways).assignments
    assert {a.engine.engine_id: (a.ranks, a.device_uuids) for a in after} == before

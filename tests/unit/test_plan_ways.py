"""Which transport a plan takes and why, whose link it is, and who may be sent a delta."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args, get_type_hints

import pytest

from controlplane.cli.plan import AskedTransport
from controlplane.coordinator.daemon import CoordinatorSettings
from controlplane.core.engine_state import Held
from controlplane.core.plan import HOST_MEMORY, Assignment, EnginePlace, LinkFate, Plan, RankPlace, Transport
from controlplane.core.planner import Ways, make_plan
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank, Term, WeightVersion

ALL = frozenset(Transport) - {Transport.CHECKPOINT}
BASE = Held(WeightVersion(6, Term(1)), b"b" * 32)
RANKS = [RankPlace(Rank(n), "h0", DeviceUuid(f"d{n}")) for n in range(2)]


def engine(
    name: str,
    *devices: str,
    host: str = "h0",
    transports: frozenset[Transport] = HOST_MEMORY,
    life: str = "i",
    streaming: bool = False,
) -> EnginePlace:
    uuids = tuple(DeviceUuid(d) for d in devices)
    where = (EngineId(name), Incarnation(life), f"{name}:1", host, uuids)
    return EnginePlace(*where, transports=transports, streaming=streaming)


def colocated(transports: frozenset[Transport] = HOST_MEMORY, *, streaming: bool = False) -> EnginePlace:
    return engine("e", "d0", transports=transports, streaming=streaming)


def near(transports: frozenset[Transport] = HOST_MEMORY) -> EnginePlace:
    return engine("e", "f0", transports=transports)


def far(transports: frozenset[Transport] = HOST_MEMORY) -> EnginePlace:
    return engine("e", "f0", host="h9", transports=transports)


def plan(engines: Iterable[EnginePlace], ways: Ways, ranks: list[RankPlace] = RANKS) -> Plan:
    return make_plan(1, list(engines), frozenset(), ranks, ways)


def only(place: EnginePlace, ways: Ways) -> Assignment:
    (found,) = plan([place], ways).assignments
    return found


def avoiding(*transports: Transport, life: str = "i", cause: str = "the probe broke") -> Ways:
    return Ways(sends=ALL, avoid={(EngineId("e"), Incarnation(life), t): cause for t in transports})


def test_whoever_asks_for_a_transport_can_name_each_that_ranks_may_send_by() -> None:
    names = {t.value for t in ALL}
    assert set(get_args(get_type_hints(CoordinatorSettings)["transport"])) == names | {"auto"}
    assert set(get_args(AskedTransport)) == names


@pytest.mark.parametrize(
    ("place", "ways", "transport", "reason"),
    [
        (colocated(), Ways(), Transport.SHARED_MEMORY, "devices shared with the slot's ranks; same host"),
        (near(), Ways(), Transport.SHARED_MEMORY, "devices of its own; same host"),
        (
            far(),
            Ways(),
            Transport.INLINE,
            "devices of its own; another host; not broadcast: the engine does not receive it",
        ),
        (
            far(ALL),
            Ways(),
            Transport.INLINE,
            "devices of its own; another host; not broadcast: the trainer does not send it",
        ),
        (far(ALL), Ways(sends=ALL), Transport.BROADCAST, "devices of its own; another host"),
        (
            colocated(ALL, streaming=True),
            Ways(sends=ALL),
            Transport.CUDA_IPC,
            "devices shared with the slot's ranks; same host; streaming, as the engine asks: installed as it comes",
        ),
        (
            colocated(ALL),
            Ways(sends=ALL),
            Transport.SHARED_MEMORY,
            "devices shared with the slot's ranks; same host; "
            "not cuda_ipc: the engine takes whole versions, and it is installed as it comes",
        ),
        (
            near(ALL),
            Ways(sends=ALL),
            Transport.SHARED_MEMORY,
            "devices of its own; same host; not cuda_ipc: other devices",
        ),
        (
            colocated(ALL),
            Ways(),
            Transport.SHARED_MEMORY,
            "devices shared with the slot's ranks; same host; not cuda_ipc: the trainer does not send it",
        ),
    ],
)
def test_the_best_way_that_both_sides_state_is_taken_and_the_reason_says_why_not_a_better_one(
    place: EnginePlace, ways: Ways, transport: Transport, reason: str
) -> None:
    found = only(place, ways)
    assert (found.transport, found.reason) == (transport, reason)


@pytest.mark.parametrize(
    ("place", "forced", "transport", "reason"),
    [
        (near(), Transport.INLINE, Transport.INLINE, "inline was asked for"),
        (near(ALL), Transport.BROADCAST, Transport.BROADCAST, "broadcast was asked for"),
        (far(), Transport.SHARED_MEMORY, Transport.INLINE, "not shared_memory, which was asked for: another host"),
        (near(ALL), Transport.CUDA_IPC, Transport.SHARED_MEMORY, "not cuda_ipc, which was asked for: other devices"),
        (
            near(),
            Transport.BROADCAST,
            Transport.SHARED_MEMORY,
            "not broadcast, which was asked for: the engine does not receive it",
        ),
    ],
)
def test_what_is_asked_for_goes_before_what_is_preferred_but_not_before_what_is_possible(
    place: EnginePlace, forced: Transport, transport: Transport, reason: str
) -> None:
    found = only(place, Ways(sends=ALL, forced=forced))
    assert found.transport is transport
    assert reason in found.reason


def test_no_engine_waits_for_whole_versions_of_ranks_that_stand_still_until_go() -> None:
    """Such ranks keep two chunks until engines take the first, after go; go would wait for the other's last one."""
    streams = engine("e1", "d0", transports=ALL, streaming=True)
    for other in (engine("e0", "d1"), engine("e0", "f0", host="h9"), engine("e0", "f0", host="h9", transports=ALL)):
        made = plan([streams, other], Ways(sends=ALL)).assignments
        assert Transport.CUDA_IPC not in {a.transport for a in made}
        assert "not cuda_ipc: e0, fed by the same ranks, takes whole versions" in made[1].reason
    alike = engine("e0", "f0", streaming=True)
    assert [a.transport for a in plan([streams, alike], Ways(sends=ALL)).assignments] == [
        Transport.SHARED_MEMORY,
        Transport.CUDA_IPC,
    ]


def test_a_way_that_failed_is_not_taken_again_and_the_cause_is_said() -> None:
    found = only(far(ALL), avoiding(Transport.BROADCAST, cause="gloo:\n  connection refused"))
    assert found.transport is Transport.INLINE
    assert found.reason.endswith("not broadcast: it failed before: gloo: connection refused")


def test_a_way_that_failed_for_an_earlier_life_is_tried_for_the_next() -> None:
    assert only(far(ALL), avoiding(Transport.BROADCAST, life="before")).transport is Transport.BROADCAST


def test_what_was_asked_for_and_failed_is_left_too() -> None:
    ways = Ways(forced=Transport.SHARED_MEMORY, avoid=avoiding(Transport.SHARED_MEMORY).avoid)
    found = only(near(), ways)
    assert found.transport is Transport.INLINE
    assert "not shared_memory, which was asked for: it failed before: the probe broke" in found.reason


def test_where_nothing_is_left_the_bytes_go_inline_which_every_engine_takes() -> None:
    found = only(near(frozenset({Transport.BROADCAST})), avoiding(*ALL))
    assert found.transport is Transport.INLINE
    assert found.reason.endswith("inline again, since nothing else is left")


def test_engines_that_a_rank_feeds_by_broadcast_share_its_link_or_have_one_each() -> None:
    engines = [engine(f"e{n}", f"f{n}", host="h9", transports=ALL) for n in (10, 2, 1)] + [engine("near", "f")]
    shared = plan(engines, Ways(sends=ALL)).assignments
    assert [(a.engine.engine_id, a.leader, a.link, a.fate) for a in shared] == [
        ("e1", 0, "0/shared", LinkFate.SHARED),
        ("e2", 1, "1/shared", LinkFate.SHARED),
        ("e10", 0, "0/shared", LinkFate.SHARED),
        ("near", 1, "", None),
    ]
    apart = plan(engines, Ways(sends=ALL, fate=LinkFate.PER_ENGINE)).assignments
    assert [a.link for a in apart] == ["0/e1", "1/e2", "0/e10", ""]


def holders(*names: str) -> frozenset[EngineId]:
    return frozenset(map(EngineId, names))


def test_inv5_an_engine_that_holds_the_base_may_be_sent_what_changed() -> None:
    found = plan(
        [engine("a", "f0", host="h9"), engine("b", "f1", host="h9")], Ways(base=BASE, holders=holders("a"))
    ).assignments
    assert [a.base for a in found] == [BASE, None]


def test_inv5_over_a_shared_link_all_engines_hold_the_base_or_none_gets_a_delta() -> None:
    engines = [engine(n, f"f-{n}", host="h9", transports=ALL) for n in ("a", "b", "c", "d")]
    ways = Ways(sends=ALL, base=BASE, holders=holders("a", "b", "c"))
    assert [(a.link, a.base) for a in plan(engines, ways).assignments] == [
        ("0/shared", BASE),
        ("1/shared", None),
        ("0/shared", BASE),
        ("1/shared", None),
    ]


def test_inv5_bytes_by_reference_and_slots_of_several_ranks_are_never_a_delta() -> None:
    wide = engine("wide", "d0", "d1")
    ways = Ways(base=BASE, holders=holders("wide", "e"))
    assert only(near(), ways).base is None
    assert only(wide, Ways(forced=Transport.INLINE, base=BASE, holders=holders("wide"))).base is None


def test_g5_the_digest_covers_all_that_ranks_act_on() -> None:
    place = far(ALL)
    made = [
        plan([place], Ways()),
        plan([place], Ways(sends=ALL)),
        plan([place], Ways(sends=ALL, fate=LinkFate.PER_ENGINE)),
        plan([place], Ways(sends=ALL, base=BASE, holders=holders("e"))),
        plan([place], Ways(sends=ALL, base=Held(BASE.version, b"c" * 32), holders=holders("e"))),
        make_plan(2, [place], frozenset(), RANKS),
        make_plan(1, [place], holders("e"), RANKS),
        make_plan(1, [colocated()], frozenset(), RANKS),
        make_plan(1, [colocated()], frozenset(), [*RANKS[1:], RankPlace(Rank(3), "h0", DeviceUuid("d0"))]),
    ]
    assert len({m.digest for m in made}) == len(made)

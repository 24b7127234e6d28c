"""Which engines of a plan install as the bytes come, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from controlplane.core.plan import HOST_MEMORY, Apply, Assignment, EnginePlace, RankPlace, Transport
from controlplane.core.planner import Ways, make_plan
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank

RANKS = [RankPlace(Rank(0), "h0", DeviceUuid("r0"))]


RANKS_OF_TWO = [RankPlace(Rank(n), "h0", DeviceUuid(f"r{n}")) for n in range(2)]


def engine(name: str, *, streaming: bool, host: str = "h0", by: Transport | None = None) -> EnginePlace:
    """`by`: it takes that and inline alone."""
    return EnginePlace(
        EngineId(name),
        Incarnation(f"{name}-1"),
        f"{name}:1",
        host,
        (DeviceUuid(f"{name}-0"),),
        transports=frozenset({Transport.INLINE, by}) if by else HOST_MEMORY | {Transport.BROADCAST},
        streaming=streaming,
    )


def plan(
    *engines: EnginePlace, forced: Transport | None = None, ranks: Sequence[RankPlace] = RANKS
) -> tuple[Assignment, ...]:
    ways = Ways(sends=HOST_MEMORY | {Transport.BROADCAST}, forced=forced)
    return make_plan(1, engines, frozenset(), ranks, ways).assignments


def test_shared_memory_streams_beside_an_engine_that_stages() -> None:
    staged, streaming = plan(engine("e0", streaming=False), engine("e1", streaming=True))
    assert (staged.apply, streaming.apply) == (Apply.STAGED, Apply.STREAMING)
    assert "streaming" in streaming.reason
    assert "streaming" not in staged.reason


def test_a_link_brings_whole_versions_and_the_reason_says_so() -> None:
    (only,) = plan(engine("e0", streaming=True, host="h1"))
    assert (only.transport, only.apply) == (Transport.BROADCAST, Apply.STAGED)
    assert "not streaming, which the engine asks for: broadcast brings whole versions" in only.reason


def test_a_leader_that_keeps_two_chunks_never_waits_for_go_and_for_the_last_byte_at_once() -> None:
    both = plan(engine("e0", streaming=False), engine("e1", streaming=True), forced=Transport.INLINE)
    assert [a.apply for a in both] == [Apply.STAGED, Apply.STAGED]
    assert "rank 0 sends in pieces, and e0 of the same plan takes whole versions" in both[1].reason


@pytest.mark.parametrize("staged", [Transport.INLINE, Transport.SHARED_MEMORY, Transport.BROADCAST])
def test_nor_does_it_while_go_waits_for_bytes_that_it_and_another_rank_make_together(staged: Transport) -> None:
    engines = [engine("e0", streaming=True, by=Transport.INLINE), engine("e1", streaming=False, by=staged)]
    first, second = plan(*engines, ranks=RANKS_OF_TWO, forced=staged)
    assert [(a.leader, a.transport) for a in (first, second)] == [(0, Transport.INLINE), (1, staged)]
    assert first.apply is Apply.STAGED
    assert "not streaming, which the engine asks for: rank 0 sends in pieces, and e1 of the same plan" in first.reason


def test_a_leader_that_keeps_everything_for_one_engine_waits_for_nobody_and_streams_to_the_others() -> None:
    """It is read out of, whenever that may be: no chunk of its waits for go."""
    pieces = [engine(n, streaming=True, by=Transport.INLINE) for n in ("e0", "e1")]
    whole = [engine(n, streaming=False, by=Transport.SHARED_MEMORY) for n in ("e2", "e3")]
    assert [a.apply for a in plan(*pieces, *whole, ranks=RANKS_OF_TWO)] == [Apply.STREAMING] * 2 + [Apply.STAGED] * 2


def test_a_leader_that_keeps_two_chunks_streams_to_engines_that_all_stream() -> None:
    both = plan(engine("e0", streaming=True), engine("e1", streaming=True), forced=Transport.INLINE)
    assert [a.apply for a in both] == [Apply.STREAMING, Apply.STREAMING]


def test_the_digest_of_a_plan_covers_how_engines_install() -> None:
    digests = {make_plan(1, [engine("e0", streaming=s)], frozenset(), RANKS).digest for s in (True, False)}
    assert len(digests) == 2

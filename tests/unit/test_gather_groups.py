"""Gather groups, each rank in a thread of its own: agreement, deadlines, and nothing left open."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from controlplane import collectives
from controlplane.core.errors import DeadlineExceeded, PeerLost, SlotMismatch
from tests.support.eventually import eventually_blocking
from trainer_agent.rank import gather
from trainer_agent.rank.gather import GatherGroups
from weightplane.local.v1 import rank_pb2

T = TypeVar("T")
PROMPTLY = 20.0
"""Seconds; an operation of gloo alone waits for 30."""


def plan(*slots: Sequence[int], revision: int = 1, digest: bytes = b"d" * 32, update: str = "u1") -> rank_pb2.PushPlan:
    made = rank_pb2.PushPlan(update_id=update, plan_revision=revision, plan_digest=digest)
    for i, ranks in enumerate(slots):
        made.shared_slots.add(engine_id=f"e{i}", ranks=ranks)
    return made


def nothing() -> None:
    """Nothing happens while waiting."""


def together(*work: Callable[[], T]) -> list[Future[T]]:
    """All at once, each in its thread; the futures are done on return."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [pool.submit(w) for w in work]


def groups(directory: Path, count: int) -> list[GatherGroups]:
    return [GatherGroups(rank, directory) for rank in range(count)]


def prepared(directory: Path, made: rank_pb2.PushPlan, count: int) -> list[GatherGroups]:
    ranks = groups(directory, count)
    for done in together(*(lambda g=g: g.prepare(made, nothing) for g in ranks)):
        done.result()
    return ranks


def test_every_rank_of_a_slot_gets_every_handle_in_the_slots_order(tmp_path: Path) -> None:
    ranks = prepared(tmp_path, plan([0, 2], [1, 2], [0, 1, 2]), 3)
    assert [len(g) for g in ranks] == [2, 2, 3]
    merged = together(
        lambda: ranks[0].merge([0, 2], b"zero", b"same", nothing), lambda: ranks[2].merge([0, 2], b"", b"same", nothing)
    )
    assert [m.result() for m in merged] == [[b"zero", b""]] * 2
    assert list(tmp_path.iterdir()) != []
    for g in ranks:
        g.close()
    assert list(tmp_path.iterdir()) == []


def test_what_differs_between_the_ranks_is_refused_on_both(tmp_path: Path) -> None:
    ranks = prepared(tmp_path, plan([0, 1]), 2)
    merged = together(
        lambda: ranks[0].merge([0, 1], b"h", b"these", nothing), lambda: ranks[1].merge([0, 1], b"h", b"those", nothing)
    )
    for m in merged:
        assert isinstance(m.exception(), SlotMismatch)
    for g in ranks:
        g.close()


def test_ranks_with_different_plans_find_out_before_the_first_collective(tmp_path: Path) -> None:
    ranks = groups(tmp_path, 2)
    name = gather._store_name(plan([0, 1]), gather.SlotKey("e0", (0, 1)))
    slot = gather.SlotKey("e0", (0, 1))
    plans = [plan([0, 1]), plan([0, 1], digest=b"x" * 32)]
    made = together(*(lambda r=r: gather.GatherGroup(slot, r, tmp_path / name, plans[r], nothing) for r in range(2)))
    for m in made:
        assert isinstance(m.exception(), SlotMismatch)
        assert "the plan" in str(m.exception())
    assert len(ranks[0]) == 0


def test_a_wait_for_a_rank_that_does_not_come_ends_when_the_push_does(tmp_path: Path) -> None:
    class Ended(Exception):
        pass

    asked = 0

    def ended() -> None:
        nonlocal asked
        asked += 1
        if asked > 3:
            raise Ended

    with pytest.raises(Ended):
        groups(tmp_path, 1)[0].prepare(plan([0, 1]), ended)
    ranks = prepared(tmp_path, plan([0, 1], update="u2"), 2)
    asked = 0
    with pytest.raises(Ended):
        ranks[0].merge([0, 1], b"h", b"c", ended)
    started = time.monotonic()
    ranks[0].close()
    assert time.monotonic() - started < PROMPTLY
    ranks[1].close()


def test_a_rank_that_goes_away_ends_what_the_others_wait_for(tmp_path: Path) -> None:
    ranks = prepared(tmp_path, plan([0, 1]), 2)
    started = time.monotonic()

    def leave() -> None:
        time.sleep(0.2)
        ranks[1].close()

    waiting, _ = together(lambda: ranks[0].merge([0, 1], b"h", b"c", nothing), leave)
    assert isinstance(waiting.exception(), PeerLost)
    assert time.monotonic() - started < PROMPTLY
    ranks[0].close()


def test_a_rank_that_never_comes_is_waited_for_until_the_joins_limit_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "JOIN_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"gather_group: waited 0\.2 s for the slot of e0"):
        groups(tmp_path, 1)[0].prepare(plan([0, 1]), nothing)
    assert 0.2 <= time.monotonic() - started < PROMPTLY


def test_a_rank_that_stops_in_the_middle_of_an_exchange_is_given_up_at_the_operations_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "OPERATION_SECONDS", 0.5)
    ranks = prepared(tmp_path, plan([0, 1]), 2)
    started = time.monotonic()
    with pytest.raises(PeerLost, match="a rank of the slot of e0"):
        ranks[0].merge([0, 1], b"h", b"c", nothing)
    assert 0.4 <= time.monotonic() - started < PROMPTLY
    for g in ranks:
        g.close()


def test_an_operation_that_outlives_its_own_limit_is_given_up_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "OPERATION_SECONDS", 0.1)
    monkeypatch.setattr(collectives, "GRACE_SECONDS", 0.1)

    class Stuck:
        def is_completed(self) -> bool:
            return False

    with pytest.raises(RuntimeError, match=r"did not end within 0\.2 s"):
        collectives.end(Stuck(), nothing)


def test_a_group_is_kept_while_its_members_are_unchanged_and_ends_with_its_slot(tmp_path: Path) -> None:
    ranks = prepared(tmp_path, plan([0, 1]), 2)
    kept = ranks[0]._groups[(0, 1)]
    ranks[0].prepare(plan([0, 1], revision=2, update="u2"), nothing)
    assert ranks[0]._groups[(0, 1)] is kept
    ranks[0].prepare(plan(revision=3, update="u3"), nothing)
    assert len(ranks[0]) == 0
    ranks[1].close()


def test_g3_fifty_replans_leave_files_sockets_threads_and_memory_as_they_were(tmp_path: Path) -> None:
    def rounds(first: int, last: int) -> None:
        for number in range(first, last):
            for g in prepared(tmp_path, plan([0, 1], update=f"u{number}"), 2):
                g.close()

    rounds(0, 10)
    before = eventually_blocking(held)  # asked as below, within a loop that has descriptors of its own
    rounds(10, 60)

    def as_before() -> bool:
        descriptors, threads, memory = held()
        assert (descriptors <= before[0] + 1, threads <= before[1] + 1) == (True, True)
        assert memory - before[2] < 20 << 20
        return True

    eventually_blocking(as_before)
    assert list(tmp_path.iterdir()) == []


def held() -> tuple[int, int, int]:
    """Descriptors, threads, resident bytes."""
    gc.collect()
    me = psutil.Process()
    return me.num_fds(), me.num_threads(), me.memory_info().rss

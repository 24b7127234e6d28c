"""Kept stacks: bounded whatever is told, gone after a day, and the newest word of each process."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core import kept_stacks
from controlplane.core.kept_stacks import (
    MAX_AGE_SECONDS,
    MAX_PROCESSES,
    MAX_TEXT_LENGTH,
    MAX_TOTAL_LENGTH,
    MAX_UPDATES,
    ProcessStacks,
    StackShelf,
)
from controlplane.core.versions import UpdateId

ONE = UpdateId("one")


def told(name: str, text: str = "at work") -> ProcessStacks:
    return ProcessStacks(name, 7, text)


def test_what_is_told_is_kept_after_the_update_and_a_later_word_of_a_process_replaces_its_first() -> None:
    shelf = StackShelf()
    shelf.put(ONE, [told("rank 0", "first"), told("rank 1")], 1.0)
    shelf.put(ONE, [told("rank 0", "second")], 2.0)
    kept = shelf.get(ONE, 3.0)
    assert [(p.name, p.text) for p in kept.processes] == [("rank 0", "second"), ("rank 1", "at work")]
    assert kept.at == 2.0
    assert shelf.get(UpdateId("another"), 3.0).processes == ()


def test_after_a_day_they_are_gone() -> None:
    shelf = StackShelf()
    shelf.put(ONE, [told("rank 0")], 0.0)
    assert shelf.get(ONE, MAX_AGE_SECONDS).processes
    assert not shelf.get(ONE, MAX_AGE_SECONDS + 1).processes
    assert shelf.length == 0


def test_more_processes_than_the_limit_do_not_push_out_those_that_came_first() -> None:
    shelf = StackShelf()
    shelf.put(ONE, [told(f"rank {i}") for i in range(MAX_PROCESSES)], 0.0)
    shelf.put(ONE, [told("one more")], 1.0)
    assert [p.name for p in shelf.get(ONE, 1.0).processes] == [f"rank {i}" for i in range(MAX_PROCESSES)]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(0, 3 * MAX_TEXT_LENGTH)), min_size=1, max_size=60
    )
)
def test_whatever_is_told_it_is_never_more_than_the_limits(words: list[tuple[int, int, int]]) -> None:
    shelf = StackShelf()
    for at, (update, count, length) in enumerate(words):
        newest = UpdateId(str(update))
        shelf.put(newest, [told(f"rank {i}", "x" * length) for i in range(count)], float(at))
        assert shelf.length <= MAX_TOTAL_LENGTH
        assert len(shelf._kept) <= MAX_UPDATES
        assert len(shelf.get(newest, float(at)).processes) == min(count, MAX_PROCESSES) or count < MAX_PROCESSES
        assert all(len(p.text) <= MAX_TEXT_LENGTH for p in shelf.get(newest, float(at)).processes)


def test_one_update_alone_is_within_the_whole_limit() -> None:
    """Else the newest would push itself out."""
    assert kept_stacks.MAX_PROCESSES * (MAX_TEXT_LENGTH + 256 + 1024) <= MAX_TOTAL_LENGTH

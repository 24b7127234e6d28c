"""Lag is counted in fleet commits: burned numbers do not inflate it, and it is never negative (V8)."""

from __future__ import annotations

from controlplane.core.lag import MAX_COMMITS, Commits, FleetCommit
from controlplane.core.pins import ANY, Pin
from controlplane.core.versions import Term, WeightVersion


def version(number: int) -> WeightVersion:
    return WeightVersion(number, Term(1))


def commits(*numbers: int, first: int = 1) -> Commits:
    made = Commits()
    made.note(FleetCommit(version(n), i) for i, n in enumerate(numbers, first))
    return made


def test_burned_numbers_do_not_inflate_lag() -> None:
    assert commits(1, 2, 40).lag(version(2)) == 1


def test_a_version_that_was_never_committed_counts_as_the_commit_before_it() -> None:
    known = commits(1, 5, 9)
    assert [known.lag(version(n)) for n in (9, 7, 5, 3, 1, 0)] == [0, 1, 1, 2, 2, 3]


def test_v8_a_version_newer_than_every_commit_has_no_negative_lag() -> None:
    assert commits(1, 2).lag(version(3)) == 0
    assert Commits().lag(version(3)) == 0


def test_what_is_older_than_all_that_is_remembered_lags_by_more_than_all_of_it() -> None:
    known = commits(*range(1, 2 * MAX_COMMITS + 1))
    assert len(known.latest) == MAX_COMMITS
    assert known.lag(version(1)) == MAX_COMMITS


def test_commits_may_be_told_twice_and_late() -> None:
    known = commits(1, 2, 3)
    known.note([FleetCommit(version(2), 2), FleetCommit(version(1), 1)])
    assert known == commits(1, 2, 3)


def test_a_pin_allows_only_what_all_of_it_allows() -> None:
    known = commits(1, 2, 3)
    assert ANY.allows(version(1), known)
    assert [Pin(min_version=version(2)).allows(version(n), known) for n in (1, 2, 3)] == [False, True, True]
    assert [Pin(exact_version=version(2)).allows(version(n), known) for n in (1, 2, 3)] == [False, True, False]
    assert [Pin(max_lag=1).allows(version(n), known) for n in (1, 2, 3)] == [False, True, True]
    assert not Pin(min_version=version(1), max_lag=0).allows(version(2), known)


def test_an_exact_pin_names_the_term_too() -> None:
    assert not Pin(exact_version=version(2)).allows(WeightVersion(2, Term(2)), Commits())

"""R2: the lag is enforced where samples become training data, and what it dropped is counted."""

from __future__ import annotations

import pytest

from controlplane.core.lag import Commits, FleetCommit
from controlplane.core.sample_spans import Span
from controlplane.core.versions import EngineId, Term, WeightVersion
from controlplane.rollout.lag_guard import LagExceeded, LagGuard, LagPolicy
from controlplane.rollout.sample import Sample


def version(number: int) -> WeightVersion:
    return WeightVersion(number, Term(1))


def sample(*spans: tuple[int, int]) -> Sample:
    """Of spans (number, tokens)."""
    made, start = [], 0
    for number, tokens in spans:
        made.append(Span(version(number), start, start + tokens))
        start += tokens
    return Sample(tuple(range(start)), (0.0,) * start, tuple(made), "stop", "", EngineId("e"), 1, 0)


@pytest.fixture
def commits() -> Commits:
    """Versions 1, 2, 9, 10 were committed; 3 to 8 were burned."""
    known = Commits()
    known.note(FleetCommit(version(n), i) for i, n in enumerate((1, 2, 9, 10), 1))
    return known


def test_R2_a_sample_that_lags_too_far_is_dropped_and_counted_by_reason_and_version(commits: Commits) -> None:
    guard = LagGuard(commits, max_lag=1)
    assert guard.admit(sample((2, 4))) is None
    assert guard.admit(sample((1, 4), (10, 4))) is None
    assert guard.admit(sample((9, 4))) is not None
    assert guard.dropped == {("lag", 2): 1, ("lag", 1): 1}
    assert guard.admitted == 1


def test_R2_burned_numbers_do_not_make_a_sample_lag(commits: Commits) -> None:
    guard = LagGuard(commits, max_lag=2)
    admitted = guard.admit(sample((2, 4)))
    assert admitted is not None
    assert admitted.lags == (2,)


def test_R2_masking_keeps_what_is_fresh_and_counts_the_rest(commits: Commits) -> None:
    guard = LagGuard(commits, max_lag=1, policy="mask")
    admitted = guard.admit(sample((2, 2), (10, 3)))
    assert admitted is not None
    assert admitted.mask == (False, False, True, True, True)
    assert guard.masked_tokens == {2: 2}
    assert guard.lags == {0: 3}


def test_R2_a_sample_of_which_nothing_is_fresh_is_dropped_by_a_mask_too(commits: Commits) -> None:
    guard = LagGuard(commits, max_lag=0, policy="mask")
    assert guard.admit(sample((2, 2))) is None
    assert guard.dropped == {("lag", 2): 1}


def test_R2_raising_names_tokens_version_and_both_numbers(commits: Commits) -> None:
    guard = LagGuard(commits, max_lag=1, policy="raise")
    with pytest.raises(LagExceeded, match=r"tokens 0 to 2 are of version 1\.2, 2 commits behind; at most 1"):
        guard.admit(sample((2, 2), (10, 1)))


def test_R2_counts_add_up(commits: Commits) -> None:
    guard = LagGuard(commits, max_lag=1)
    samples = [sample((n, 1)) for n in (1, 2, 9, 10)] * 3
    assert len(guard.admit_all(samples)) == guard.admitted == 6
    assert guard.admitted + guard.dropped.total() == len(samples)
    assert guard.lags == {0: 3, 1: 3}


def test_work_that_would_be_too_old_when_it_ends_is_not_begun(commits: Commits) -> None:
    guard = LagGuard(commits, max_lag=1)
    assert guard.may_begin(version(10))
    assert not guard.may_begin(version(9))
    assert guard.may_begin(version(9), pending_commits=0)


def test_R2_a_push_under_way_puts_the_learner_ahead_of_the_fleet(commits: Commits) -> None:
    guard = LagGuard(commits, max_lag=1)
    admitted = guard.admit(sample((10, 4)), pending_commits=1)
    assert admitted is not None
    assert admitted.lags == (1,)
    assert guard.admit(sample((9, 4)), pending_commits=1) is None
    with pytest.raises(LagExceeded, match="2 commits behind; at most 1"):
        LagGuard(commits, max_lag=1, policy="raise").admit(sample((9, 4)), pending_commits=1)


def test_R2_a_group_is_admitted_whole_or_dropped_whole_and_each_sample_is_counted_with_its_reason(
    commits: Commits,
) -> None:
    guard = LagGuard(commits, max_lag=1)
    assert guard.admit_group([sample((10, 4)), sample((2, 4))]) is None
    assert guard.dropped == {("group", 10): 1, ("lag", 2): 1}
    assert guard.admitted == 0
    admitted = guard.admit_group([sample((10, 4)), sample((9, 4))])
    assert admitted is not None
    assert [each.lags for each in admitted] == [(0,), (1,)]


def test_R2_masking_keeps_a_group_of_which_each_sample_has_fresh_tokens(commits: Commits) -> None:
    guard = LagGuard(commits, max_lag=1, policy="mask")
    admitted = guard.admit_group([sample((2, 4), (10, 2)), sample((9, 4))])
    assert admitted is not None
    assert admitted[0].mask == (False,) * 4 + (True,) * 2
    assert guard.admit_group([sample((2, 4)), sample((9, 4))]) is None


@pytest.mark.parametrize("policy", ["drop", "mask", "raise"])
def test_R2_a_sample_without_a_token_is_no_training_data_and_is_counted(commits: Commits, policy: LagPolicy) -> None:
    """It was aborted before its first one: there is no version that it could be counted by."""
    guard = LagGuard(commits, max_lag=1, policy=policy)
    assert guard.admit(sample()) is None
    assert guard.admit_group([sample((10, 4)), sample()]) is None
    assert guard.dropped == {("empty", None): 2, ("group", 10): 1}
    assert (guard.admitted, guard.lags) == (0, {})


def test_R2_a_group_with_a_late_sample_and_one_without_a_token_is_dropped_whole(commits: Commits) -> None:
    guard = LagGuard(commits, max_lag=1)
    assert guard.admit_group([sample(), sample((2, 4)), sample((10, 4))]) is None
    assert guard.dropped == {("empty", None): 1, ("lag", 2): 1, ("group", 10): 1}

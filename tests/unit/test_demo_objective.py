"""GRPO's arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from trainer_agent.demo.objective import Trajectory, behaviour_gap, clipped_loss, group_advantages, make_batch


def test_advantages_are_against_the_samples_own_group() -> None:
    first, second, third, fourth = group_advantages([0.0, 1.0, 5.0, 7.0], group_size=2)
    assert (first, second) == pytest.approx((-1, 1), abs=1e-3)
    assert (third, fourth) == pytest.approx((-1, 1), abs=1e-3)


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    assert group_advantages([0.3, 0.3, 0.3], group_size=3) == pytest.approx([0, 0, 0])


def test_only_generated_tokens_are_labels_with_a_loss() -> None:
    batch = make_batch([Trajectory((7, 8), (9, 10), (-1.0, -2.0), 0.0)], [0.5], length=4, rows=2)
    assert batch.tokens.tolist() == [[7, 8, 9, 0], [0, 0, 0, 0]]
    assert batch.labels.tolist() == [[8, 9, 10, 0], [0, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1, 0], [0, 0, 0, 0]]
    assert batch.behaviour.tolist() == [[0, -1, -2, 0], [0, 0, 0, 0]]
    assert batch.advantages[0].tolist() == [0.5] * 4


def test_a_sample_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into 3"):
        make_batch([Trajectory((1, 2), (3, 4), (0.0, 0.0), 0.0)], [1.0], length=2, rows=1)
    with pytest.raises(ValueError, match="do not fit into 0 rows"):
        make_batch([Trajectory((1,), (3,), (0.0,), 0.0)], [1.0], length=2, rows=0)


@pytest.mark.parametrize(
    ("advantage", "ratio", "gain"),
    [(1.0, 1.5, 1.2), (1.0, 0.5, 0.5), (-1.0, 1.5, -1.5), (-1.0, 0.5, -0.8), (1.0, 1.1, 1.1)],
)
def test_the_ratio_is_clipped_only_where_it_would_gain_more(advantage: float, ratio: float, gain: float) -> None:
    batch = make_batch([Trajectory((1,), (2,), (-1.0,), 0.0)], [advantage], length=1, rows=1)
    logprobs = torch.tensor([[-1.0 + math.log(ratio)]])
    assert clipped_loss(logprobs, batch, 0.2).item() == pytest.approx(-gain)


def test_prompt_and_padding_have_no_gradient() -> None:
    batch = make_batch([Trajectory((1, 2), (3,), (-1.0,), 0.0)], [1.0], length=4, rows=1)
    logprobs = torch.full((1, 4), -1.5, requires_grad=True)
    (gradient,) = torch.autograd.grad(clipped_loss(logprobs, batch, 0.2), logprobs)
    assert (gradient != 0).tolist() == [[False, True, False, False]]


def test_the_gap_is_the_largest_difference_of_a_generated_token() -> None:
    batch = make_batch([Trajectory((1,), (2, 3), (-1.0, -2.0), 0.0)], [1.0], length=3, rows=1)
    assert behaviour_gap(torch.tensor([[-1.25, -2.0, 99.0]]), batch).item() == 0.25

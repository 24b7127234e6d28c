"""GRPO's arithmetic: what is maximised, on plain tensors.

A prompt is sampled several times; a sample's advantage is its reward against its own group's mean, in
units of the group's spread. Each generated token's probability ratio (policy now, over the policy that
the engine sampled from) is clipped as in PPO. Prompt tokens and padding carry no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ADVANTAGE_EPSILON = 1e-4
"""Keeps a group whose rewards are all alike at advantage 0."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A sample as training sees it. `logprobs` are the engine's, one for each of `tokens`."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float


@dataclass(frozen=True, slots=True)
class Batch:
    """[samples, length] each. Position t predicts `labels[:, t]` from `tokens[:, : t + 1]`."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    """1.0 where the label was generated."""
    behaviour: Tensor
    """Logprob of the label under the policy that sampled it."""
    advantages: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def rows(self, begin: int, end: int) -> Batch:
        s = slice(begin, end)
        return Batch(self.tokens[s], self.labels[s], self.mask[s], self.behaviour[s], self.advantages[s])


def group_advantages(rewards: Sequence[float], group_size: int) -> list[float]:
    """Rewards in groups of consecutive samples -> each against its group's mean, over the group's deviation."""
    groups = torch.tensor(rewards, dtype=torch.float64).view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    spread = groups.std(dim=1, keepdim=True, unbiased=False)
    advantages: list[float] = (centred / (spread + ADVANTAGE_EPSILON)).flatten().tolist()
    return advantages


def make_batch(trajectories: Sequence[Trajectory], advantages: Sequence[float], length: int, rows: int) -> Batch:
    """Pad the samples to `length` predicted tokens, and the batch with empty samples to `rows`.

    Raises:
        ValueError: a sample is longer, or there are more samples than rows.
    """
    if len(trajectories) > rows:
        raise ValueError(f"{len(trajectories)} samples do not fit into {rows} rows")
    tokens, labels = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length, dtype=torch.long)
    mask, behaviour, advantage = torch.zeros(rows, length), torch.zeros(rows, length), torch.zeros(rows, length)
    for row, (trajectory, value) in enumerate(zip(trajectories, advantages, strict=True)):
        ids = torch.tensor(trajectory.prompt + trajectory.tokens)
        end = len(ids) - 1
        if end > length:
            raise ValueError(f"a sample of {len(ids)} tokens does not fit into {length + 1}")
        generated = slice(len(trajectory.prompt) - 1, end)
        tokens[row, :end], labels[row, :end] = ids[:-1], ids[1:]
        mask[row, generated] = 1.0
        behaviour[row, generated] = torch.tensor(trajectory.logprobs)
        advantage[row] = value
    return Batch(tokens, labels, mask, behaviour, advantage)


def clipped_loss(logprobs: Tensor, batch: Batch, clip: float) -> Tensor:
    """Sum over generated tokens of -min(ratio·A, clip(ratio, 1 ± clip)·A); a scalar to be divided by their number."""
    ratio = ((logprobs - batch.behaviour) * batch.mask).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * batch.advantages, bounded * batch.advantages)
    return -(gain * batch.mask).sum()


def behaviour_gap(logprobs: Tensor, batch: Batch) -> Tensor:
    """Largest |trainer's - engine's| logprob of a generated token: near 0 while both hold the same weights."""
    return ((logprobs - batch.behaviour).abs() * batch.mask).max()

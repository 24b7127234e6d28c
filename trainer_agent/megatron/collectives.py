"""Megatron's process groups as an export uses them, each collective with a deadline.

Promises: no wait outlasts the deadline, whatever became of a peer. After a failure nothing is tried again: ranks that
are out of step could take one tensor's bytes for another's. Nothing is pickled: what ranks tell each other is JSON.
Parameters may lie on another device than the groups communicate on (Megatron's offloading); they are
brought there one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_agent.megatron.errors import GatherFailed

GATHER_DEADLINE_SECONDS = 120.0
"""For one collective. A peer that died or left the iteration early ends the push, not the patience."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group seen from this rank."""

    title: str
    """What people call it, in errors."""
    handle: Any

    @property
    def size(self) -> int:
        return dist.get_world_size(self.handle)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.handle)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups over which a model is split. Context- and data-parallel ones are none: their ranks hold the same."""

    tensor: Group
    pipeline: Group
    expert: Group
    expert_tensor: Group
    """Experts are split over tensor-parallel ranks of their own."""
    world: Group

    @classmethod
    def of_megatron(cls) -> Groups:
        from megatron.core import parallel_state  # seconds, which who only checks holdings need not wait

        return cls(
            tensor=Group("a tensor-parallel peer", parallel_state.get_tensor_model_parallel_group()),
            pipeline=Group("another pipeline stage", parallel_state.get_pipeline_model_parallel_group()),
            expert=Group("an expert-parallel peer", parallel_state.get_expert_model_parallel_group()),
            expert_tensor=Group("an expert's tensor-parallel peer", parallel_state.get_expert_tensor_parallel_group()),
            world=Group("a peer", dist.group.WORLD),
        )


class Collectives:
    """Collectives over those groups. Each raises GatherFailed when a peer does not take part in time."""

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline = timedelta(seconds=deadline_seconds)
        self._broken = ""
        self.groups = Groups.of_megatron()
        self.device = _communication_device(self.groups.tensor)

    def give_up(self, cause: str) -> None:
        """Ranks may be out of step from now on: each further collective fails at once."""
        self._broken = self._broken or cause

    def broadcast(self, tensor: Tensor, group: Group, source: int, gathered: str) -> None:
        """Overwrite `tensor` by what the group's rank `source` has in it."""
        if group.size > 1:
            self._run(dist.broadcast, tensor, group=group, gathered=gathered, group_src=source)

    def all_gather(self, tensor: Tensor, group: Group, gathered: str) -> list[Tensor]:
        """Every rank's tensor, of one shape, in the group's order."""
        if group.size == 1:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(group.size)]
        self._run(dist.all_gather, tensors, tensor, group=group, gathered=gathered)
        return tensors

    def exchange(self, value: Any, group: Group, gathered: str) -> list[Any]:
        """Every rank's value, in the group's order. Values are what JSON has: tuples come as lists."""
        text = json.dumps(value).encode()
        lengths = self.all_gather(torch.tensor([len(text)], device=self.device), group, gathered)
        longest = max(int(n) for n in lengths)
        padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(self.device)
        answers: Sequence[Tensor] = self.all_gather(padded, group, gathered)
        return [json.loads(bytes(answer.cpu().numpy())) for answer in answers]

    def _run(self, collective: Any, *tensors: Any, group: Group, gathered: str, **options: Any) -> None:
        if self._broken:
            raise GatherFailed(f"{gathered}: not gathered, since the process groups broke before: {self._broken}")
        try:
            collective(*tensors, group=group.handle, async_op=True, **options).wait(self._deadline)
        except RuntimeError as error:
            self.give_up(f"{gathered}: {group.title} did not take part in gathering it: {error}")
            raise GatherFailed(self._broken) from error


def _communication_device(group: Group) -> torch.device:
    if "nccl" in dist.get_backend(group.handle):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

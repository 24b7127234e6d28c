"""A rank as a thread of the test's own process: the real TrainerRank, without the seconds that a process takes.

For tests that look at what moves between a rank and engines; that a rank is a process is another test's matter.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from engine_agent.memory.engine import token_of, weights_of
from tests.support.toy_rank import tensors_of
from trainer_agent.rank.exporter import layout_of
from trainer_agent.rank.gather import GatherGroups
from trainer_agent.rank.link import Patience, RankLink
from trainer_agent.rank.report import PushReport
from trainer_agent.rank.spawn import RankPlace
from trainer_agent.rank.trainer_rank import TrainerRank
from trainer_agent.segments import SegmentPool
from trainer_agent.source import ParamMeta

JOIN_SECONDS = 90.0
VOCABULARY = 256
PROMPT = (1, 2, 3)
"""What `LocalFleet.generate` asks with."""


class Source:
    """The tensors of a step; `before(name)` is called before each is yielded, in the rank's thread."""

    def __init__(self, tensors: Callable[[int], Mapping[str, torch.Tensor]] = tensors_of) -> None:
        self.step = 0
        self.before: Callable[[str], None] = lambda name: None
        self._tensors = tensors

    def metadata(self) -> Sequence[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self._tensors(0).items()]

    def ties(self) -> Sequence[tuple[str, str]]:
        return []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors(self.step).items():
            self.before(name)
            yield name, tensor


class ThreadRank:
    """The only rank of a trainer."""

    def __init__(self, rank: TrainerRank, source: Source) -> None:
        self.rank = rank
        self.source = source

    @classmethod
    async def join(cls, socket: Path, source: Source, push_timeout: float = 60.0) -> ThreadRank:
        return cls(await asyncio.to_thread(join, socket, source, push_timeout), source)

    async def push(self, step: int) -> PushReport:
        self.source.step = step
        return await asyncio.to_thread(self.rank.push, step)

    def die(self) -> None:
        """What the kernel does when a process dies: every connection ends, nothing is said."""
        self.rank._closed = True
        self.rank._link.close()
        self.rank._pushes.held.close()

    async def close(self) -> None:
        await asyncio.to_thread(self.rank.close)


def join(socket: Path, source: Source, push_timeout: float, number: int = 0, world: int = 1) -> TrainerRank:
    """Rank `number` of so many."""
    patience = Patience(JOIN_SECONDS)
    place = RankPlace(rank=number, world_size=world, local_rank=number, restart_count=0)
    groups = GatherGroups(number, socket.parent)
    rank = TrainerRank(RankLink(socket, patience), place, layout_of(source), source, groups)
    rank._push_seconds = push_timeout
    rank._join("policy", None, JOIN_SECONDS, patience)
    rank._pushes.held.segments = SegmentPool(rank.run_id, number)
    return rank


def tokens_of(tensors: Mapping[str, torch.Tensor], count: int) -> list[int]:
    """What an in-memory engine with exactly these bytes answers to `LocalFleet.generate`."""
    digests = {n: hashlib.sha256(t.contiguous().numpy().tobytes()).digest() for n, t in tensors.items()}
    weights = weights_of(digests)
    return [token_of(weights, PROMPT, position, VOCABULARY) for position in range(count)]


class Toy(Source):
    """What the toys' engines expect."""

    def ties(self) -> Sequence[tuple[str, str]]:
        return [("tied", "embed")]

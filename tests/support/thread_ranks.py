"""Several ranks as threads of the test's own process, whose weights are read together: a model that is split over them.

Real TrainerRanks, real gather groups, each with a thread and a device of its own. An iteration meets the other ranks at
every tensor, as the collectives of pipeline and tensor parallel stages do: nobody reads on alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from controlplane.core.versions import DeviceUuid
from controlplane.devices import cpu_device_uuid
from tests.support.thread_rank import Source, join
from trainer_agent.rank import cuda_ipc, trainer_rank
from trainer_agent.rank.report import PushReport
from trainer_agent.rank.trainer_rank import TrainerRank

_mine = threading.local()


class RankThread:
    """One of them. What it does is done in its own thread: the loop's pool has too few for many that wait."""

    def __init__(self, number: int, source: Source) -> None:
        self.source = source
        self._number = number
        self._thread = ThreadPoolExecutor(1, f"rank-{number}", initializer=_be, initargs=(number,))
        self._rank: TrainerRank | None = None

    async def join(self, socket: Path, world: int, push_timeout: float) -> None:
        self._rank = await self._do(lambda: join(socket, self.source, push_timeout, self._number, world))

    async def push(self, step: int) -> PushReport:
        rank = self._rank
        assert rank is not None, "it joined"
        self.source.step = step
        report: PushReport = await self._do(lambda: rank.push(step))
        return report

    async def close(self) -> None:
        if self._rank is not None:
            await self._do(self._rank.close)
        self._thread.shutdown(wait=False)

    async def _do(self, what: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, what)


class ThreadRanks:
    """All of one trainer. A push that stands still for `within` seconds raises on every rank."""

    def __init__(self, world: int, tensors: Callable[[int], Mapping[str, torch.Tensor]], within: float) -> None:
        self._meeting = threading.Barrier(world, timeout=within)
        self._within = within
        self.ranks = [RankThread(n, Source(tensors)) for n in range(world)]
        for rank in self.ranks:
            rank.source.before = lambda name: self._meet()

    def _meet(self) -> None:
        self._meeting.wait()

    async def join(self, socket: Path) -> None:
        await asyncio.gather(*(r.join(socket, len(self.ranks), self._within) for r in self.ranks))

    async def push(self, step: int) -> PushReport:
        """The first rank's report; every other one's is the same. Raises what a rank raised."""
        reports = await asyncio.gather(*(r.push(step) for r in self.ranks), return_exceptions=True)
        for report in reports:
            if isinstance(report, BaseException):
                raise report
        first = reports[0]
        assert isinstance(first, PushReport)
        return first

    async def close(self) -> None:
        self._meeting.abort()
        await asyncio.gather(*(r.close() for r in self.ranks))


def own_devices(patch: pytest.MonkeyPatch) -> None:
    """Rank n computes on CPU device n, though all of them are one process."""
    for module in (trainer_rank, cuda_ipc):
        patch.setattr(module, "current_device", _device)


def _be(number: int) -> None:
    _mine.number = number


def _device() -> DeviceUuid:
    return cpu_device_uuid(_mine.number)

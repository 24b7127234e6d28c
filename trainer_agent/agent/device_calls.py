"""take_devices and give_devices of all ranks: done once when every rank asked, and answered to every rank alike.

Promises: nobody waits for a rank that is gone or does not come; ranks that ask for different things are told so, and
nothing is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from controlplane.core.errors import DeadlineExceeded, PeerLost, SlotMismatch, WeightplaneError
from trainer_agent.agent.ranks import RankConnection
from trainer_agent.agent.rankset import RankSet
from trainer_agent.agent.time_sharing import TimeSharing
from weightplane.local.v1 import rank_pb2

log = structlog.get_logger(__name__)

LEAVE_SECONDS = 30.0
"""Longest that engines may take to wake when the ranks have left."""


class DeviceCalls:
    """Of one life of the ranks."""

    def __init__(self, ranks: RankSet, sharing: TimeSharing) -> None:
        self.sharing = sharing
        self._ranks = ranks
        self._asked: dict[int, rank_pb2.DevicesAsked] = {}
        self._task: asyncio.Task[None] | None = None
        self._limit: asyncio.TimerHandle | None = None

    def asked(self, rank: RankConnection, asked: rank_pb2.DevicesAsked) -> None:
        """A rank entered take_devices() or give_devices()."""
        self._asked[rank.rank] = asked
        if self._ranks.lost is not None:
            self._answer(self._ranks.lost)
        elif len(self._asked) == self._ranks.world_size:
            self._stop_waiting()
            self._task = asyncio.create_task(self._run())
        elif self._limit is None:
            loop = asyncio.get_running_loop()
            self._limit = loop.call_later(asked.timeout_seconds, self._too_late, asked.timeout_seconds)

    def fail(self, error: WeightplaneError) -> None:
        """A rank is gone, or all are fenced: engines that were asked go on to the end of it."""
        if self._asked and (self._task is None or self._task.done()):
            self._answer(error)

    async def close(self) -> None:
        self._stop_waiting()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def left(self) -> None:
        """The ranks are gone and their memory with them: what they took is given back."""
        if not self._ranks.holds_devices:
            return
        try:
            await self.sharing.give(LEAVE_SECONDS)
        except WeightplaneError as error:
            log.error("devices_not_given", reason=error.reason, cause=str(error))

    def _stop_waiting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _too_late(self, seconds: float) -> None:
        missing = sorted(set(range(self._ranks.world_size)) - self._asked.keys())
        self._answer(DeadlineExceeded(phase="devices", waited_for=f"ranks {missing}", waited_seconds=seconds))

    async def _run(self) -> None:
        """Supervises: an error of our own must not leave ranks waiting for an answer."""
        first = next(iter(self._asked.values()))
        seconds = min(a.timeout_seconds for a in self._asked.values())
        error: WeightplaneError | None = self._disagreement()
        poisoned: dict[str, str] = {}
        try:
            if error is None and first.take:
                await self.sharing.take(first.level, seconds)
            elif error is None:
                poisoned = await self.sharing.give(seconds)
        except WeightplaneError as refused:
            error = refused
        except Exception as broke:
            log.exception("devices_broke")
            error = PeerLost(peer="the trainer agent", cause=repr(broke))
        self._answer(error, poisoned)

    def _disagreement(self) -> SlotMismatch | None:
        said = {r: f"take, level {a.level}" if a.take else "give" for r, a in sorted(self._asked.items())}
        if len(set(said.values())) == 1:
            return None
        return SlotMismatch(engine_id="every engine", what="what to do with the devices", ranks=str(said))

    def _answer(self, error: WeightplaneError | None, poisoned: Mapping[str, str] | None = None) -> None:
        self._stop_waiting()
        asked, self._asked = self._asked, {}
        for rank, what in asked.items():
            done = rank_pb2.DevicesDone(sequence=what.sequence, poisoned=poisoned)
            if error is not None:
                done.error_reason, done.error_message = error.reason, str(error)
                done.error_metadata.update(error.metadata())
            member = self._ranks.members.get(rank)
            if member is not None:
                member.send(rank_pb2.RankResponse(devices_done=done))

"""The trainer agent: the one process of a trainer's node that speaks gRPC, between its ranks and the fleet.

Promises: it holds the lease for as long as its set of ranks lives, by heartbeats from its own loop; a rank that
dies in mid-push ends that push for all at once, and nothing of it is committed; when the coordinator says that a
later term was given, every rank hears `fenced` (INV-7). Segments of dead ranks are swept.

Refuses ranks of several lives at once: a set that lost a rank is over, and the next one has an incarnation of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from controlplane.core.errors import (
    DeadlineExceeded,
    FrameInvalid,
    LeaseHeld,
    PeerLost,
    StaleTerm,
    WeightplaneError,
)
from controlplane.rpc.channels import open_channel
from trainer_agent import segments
from trainer_agent.lastlife import LastLife
from trainer_agent.outcome import failed
from trainer_agent.plans import for_rank
from trainer_agent.push import Push, PushContext
from trainer_agent.ranks import RankConnection, RankServer
from trainer_agent.rankset import RankSet
from trainer_agent.session import FleetSession, discover_run
from trainer_agent.settings import TrainerSettings
from trainer_agent.stubs import Stubs
from trainer_agent.wire import typed_error
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2

log = structlog.get_logger(__name__)

RETRY_SECONDS = 0.5
"""First pause before a push is repeated; it doubles."""
MAX_RETRY_SECONDS = 5.0
MIN_RETRY_SECONDS_LEFT = 5.0
"""With less time than this left a failed push is not repeated."""


class TrainerAgent:
    """Owns one trainer's ranks on this node, its lease, and its pushes."""

    def __init__(self, settings: TrainerSettings, socket_path: Path) -> None:
        self._settings = settings
        self._server = RankServer(socket_path, self)
        self._stubs = Stubs(settings.coordinator, open_channel)
        self._life = LastLife(settings.state_dir)
        self._set: RankSet | None = None
        self._session: FleetSession | None = None
        self._push: Push | None = None
        self._begun: dict[int, rank_pb2.PushBegin] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waits_for: WeightplaneError | None = None
        self._run_id = settings.run_id
        self._term = 0
        self._failures = 0
        """Attempts of the present push that failed."""
        self._push_ends = 0.0
        self._joined = False
        self.fence: StaleTerm | None = None
        """Set once, when the trainer is fenced: nothing is started again after it."""
        self.ended = asyncio.Event()
        """A set of ranks has come and gone, and no new one is there."""

    async def start(self) -> None:
        """Sweep what dead ranks left, and listen."""
        segments.sweep()
        await self._server.start()

    async def close(self, goodbye: str = "the trainer ends") -> None:
        """Say goodbye, drop the ranks, sweep. The lease is given back."""
        if self._session is not None:
            await self._session.close(goodbye)
        await self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stubs.close()
        segments.sweep()

    @property
    def pids(self) -> list[int]:
        """Processes of the connected ranks."""
        return [c.pid for c in self._set.members.values()] if self._set else []

    # ---- what ranks say (RankEvents) ----

    def rank_said(self, rank: RankConnection, request: rank_pb2.RankRequest) -> None:
        kind = request.WhichOneof("message")
        try:
            if kind == "join":
                self._join(rank)
            elif self._set is not None and self._set.members.get(rank.rank) is rank:
                self._take(kind or "", rank, request)
        except WeightplaneError as error:
            rank.refuse(error)
            if self._set is not None and not self._joined:
                self._set.refuse(error)

    def rank_gone(self, rank: RankConnection, cause: str) -> None:
        ranks = self._set
        if ranks is None or not ranks.remove(rank, cause):
            return
        log.info("rank_gone", rank=rank.rank, cause=cause, left=len(ranks.members))
        assert ranks.lost is not None, "the set just lost a rank"
        if self._push is not None:
            self._push.fail(ranks.lost)
        elif self._begun or not self._joined:
            self._end_waiting(ranks)
        if ranks.ended:
            self._spawn(self._set_ended(ranks, on_purpose=rank.left))

    def _take(self, kind: str, rank: RankConnection, request: rank_pb2.RankRequest) -> None:
        assert self._set is not None, "asked of a member"
        if kind == "layout_part":
            self._set.add_part(request.layout_part)
            self._when_complete()
        elif kind == "progress":
            self._moved(rank.rank, request.progress.step, request.progress.phase)
        elif kind == "push_begin":
            self._moved(rank.rank, request.push_begin.step, "push")
            self._push_begin(rank, request.push_begin)
        elif self._push is not None and kind == "send_chunk":
            self._push.take_chunk(rank.rank, request.send_chunk)
        elif self._push is not None and kind == "push_end":
            self._push.take_end(rank.rank, request.push_end)
        elif kind == "push_failed":
            self._push_failed(rank, request.push_failed)

    def _moved(self, rank: int, step: int, phase: str) -> None:
        assert self._set is not None, "asked of a member"
        self._set.moved(rank, step, phase)
        if self._session is not None:
            self._session.changed()

    # ---- joining ----

    def _join(self, rank: RankConnection) -> None:
        if self.fence is not None:
            rank.refuse(self.fence, fenced=True)
            return
        join = rank.join
        if self._set is None or self._set.ended or join.restart_count > self._set.restart_count:
            self._new_set(join)
        assert self._set is not None, "just made"
        if join.restart_count < self._set.restart_count:
            raise FrameInvalid(message="Join", field="restart_count", problem=f"{join.restart_count} is over")
        self._set.add(rank)
        self._when_complete()

    def _new_set(self, join: rank_pb2.Join) -> None:
        """A new life. What is left of the last one is told so."""
        if self._set is not None and not self._set.ended:
            self._set.refuse(PeerLost(peer="this life of the trainer", cause=f"restart {join.restart_count} began"))
        if self._push is not None:
            self._push.fail(PeerLost(peer="this life of the trainer", cause="the next one began"))
        self._set = RankSet(join, self._settings.model)
        self._begun.clear()
        self._joined, self._failures = False, 0
        self.ended.clear()
        self._spawn(self._join_limit(self._set, join.timeout_seconds))

    def _when_complete(self) -> None:
        ranks = self._set
        if ranks is None or not ranks.complete or self._joined:
            return
        error = ranks.disagreement()
        if error is not None:
            ranks.refuse(error)
            return
        self._joined = True
        self._spawn(self._open_session(ranks))

    async def _open_session(self, ranks: RankSet) -> None:
        if self._session is not None:
            await self._session.close(None)
        try:
            self._run_id = self._run_id or await discover_run(self._stubs.fleet, ranks.model)
        except WeightplaneError as error:
            self.refused(error)
            return
        hello = ranks.hello(self._run_id, self._settings.trainer_id)
        hello.ended_incarnation = self._life.ended_incarnation()
        hello.takeover = self._settings.takeover
        self._session = FleetSession(self._stubs.fleet, hello, lambda: ranks.status(self._term), self)
        self._session.start()

    async def _join_limit(self, ranks: RankSet, seconds: float) -> None:
        """Ranks that wait in vain are told for what."""
        await asyncio.sleep(seconds)
        if self._set is not ranks or ranks.ended or (self._joined and self._term):
            return
        if isinstance(self._waits_for, LeaseHeld):
            ranks.refuse(self._waits_for)
            return
        absent = f"ranks {ranks.missing}" if ranks.missing else f"the lease ({self._waits_for or 'no answer yet'})"
        ranks.refuse(DeadlineExceeded(phase="join", waited_for=absent, waited_seconds=seconds))

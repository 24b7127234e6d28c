"""The trainer agent: the one process of a trainer's node that speaks gRPC, between its ranks and the fleet.

Promises: it holds the lease for as long as its set of ranks lives, by heartbeats from its own loop; a rank that
dies is told to the coordinator in that moment, and in mid-push it ends that push for all at once, and nothing of it is
committed; when the coordinator says that a later term was given, every rank hears `fenced` (INV-7). Segments of dead
ranks are swept.

Refuses ranks of several lives at once: a set that lost a rank is over, and the next one has an incarnation of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
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
from controlplane.rpc.metrics import serve_metrics, watch_loop
from controlplane.rpc.security import ServerSecurity
from controlplane.rpc.security.diagnosis import Reached
from controlplane.rpc.server import RunningServer
from controlplane.tracing import sending_spans
from trainer_agent import segments
from trainer_agent.agent.asked import PushContext
from trainer_agent.agent.avoided import Avoided
from trainer_agent.agent.checkpoints import FINISH_SECONDS, CheckpointKeeper
from trainer_agent.agent.device_calls import DeviceCalls
from trainer_agent.agent.lastlife import LastLife
from trainer_agent.agent.lifecycle_service import TrainerLifecycle, serve
from trainer_agent.agent.metrics import TrainerMetrics
from trainer_agent.agent.output import RankOutput
from trainer_agent.agent.pusher import Pusher
from trainer_agent.agent.ranks import RankConnection, RankServer
from trainer_agent.agent.rankset import RankSet
from trainer_agent.agent.session import FleetSession, discover_run
from trainer_agent.agent.settings import TrainerSettings
from trainer_agent.agent.stubs import Stubs
from trainer_agent.agent.time_sharing import TimeSharing
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2

log = structlog.get_logger(__name__)

FIND_OUT_SECONDS = 60.0
"""Longest that the coordinator may take to say which engines sleep for this trainer."""


class TrainerAgent:
    """Owns one trainer's ranks on this node, its lease, and its pushes."""

    def __init__(
        self,
        settings: TrainerSettings,
        socket_path: Path,
        *,
        stop: asyncio.Event | None = None,
        output: RankOutput | None = None,
    ) -> None:
        """`stop` ends the ranks in order, `output` is what they write; None: neither is this agent's."""
        self._settings = settings
        self._lifecycle = TrainerLifecycle(settings, self, stop, output)
        self._serving: RunningServer | None = None
        self._end_metrics: Callable[[], None] = lambda: None
        self._tracing = AsyncExitStack()
        self._server = RankServer(socket_path, self)
        self._stubs = Stubs(settings.coordinator, partial(open_channel, tls=settings.tls))
        self._life = LastLife(settings.state_dir)
        self._checkpoints = _checkpoints(settings)
        self._avoided = Avoided()
        self._set: RankSet | None = None
        self._pusher: Pusher | None = None
        self._devices: DeviceCalls | None = None
        self._session: FleetSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waits_for: WeightplaneError | None = None
        """Why the lease is not held yet."""
        self._run_id = settings.run_id
        self.refusal: WeightplaneError | None = None
        """Why the coordinator wants no more of this trainer. StaleTerm: fenced, nothing is started again."""
        self.refused_event = asyncio.Event()
        """Set with `refusal`."""
        self.ended = asyncio.Event()
        """Every rank that was there is gone."""

    async def start(self) -> None:
        """Sweep what dead ranks left, and listen. Raises PortUnavailable, ConfigError."""
        segments.sweep()
        settings = self._settings
        await self._tracing.enter_async_context(
            sending_spans(settings.tracing, "trainer", settings.trainer_id, settings.run_id)
        )
        self._end_metrics = serve_metrics(settings.metrics_listen, TrainerMetrics(self), tls=settings.tls)
        self._spawn(watch_loop())
        security = ServerSecurity(settings.tls, settings.insecure, settings.run_id, settings.rate)
        self._serving = await serve(self._lifecycle, settings.listen, security)
        await self._server.start()
        if self._settings.address_file is not None:
            self._settings.address_file.write_text(self._serving.address)

    async def close(self, goodbye: str = "the trainer ends") -> None:
        """Say goodbye, drop the ranks, sweep. The lease is given back."""
        if self._pusher is not None:
            await self._pusher.close()
        if self._devices is not None:
            await self._devices.close()
        await self._finish_checkpoint()
        if self._session is not None:
            await self._session.close(goodbye)
        await self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stubs.close()
        self._end_metrics()
        if self._serving is not None:
            await self._serving.stop()
        segments.sweep()
        await self._tracing.aclose()

    @property
    def lease_held_by_another(self) -> bool:
        """The last word on the lease was that somebody else holds it."""
        return isinstance(self._waits_for, LeaseHeld)

    @property
    def pids(self) -> list[int]:
        """Processes of the connected ranks."""
        return [c.pid for c in self._set.members.values()] if self._set else []

    # ---- what people ask (Trainer) ----

    @property
    def ranks(self) -> RankSet | None:
        """The present life of the set of ranks."""
        return self._set

    @property
    def run_id(self) -> str:
        """Empty: not known yet."""
        return self._run_id

    @property
    def waits_for(self) -> str:
        """Why the lease is not held."""
        error = self.refusal or self._waits_for
        return "" if error is None else str(error)

    @property
    def update(self) -> fleet_pb2.UpdateState | None:
        """The update that is being carried."""
        return None if self._pusher is None else self._pusher.update

    @property
    def checkpoint(self) -> str:
        """What is being written to disk."""
        return "" if self._checkpoints is None else self._checkpoints.name

    # ---- what ranks say (RankEvents) ----

    def rank_said(self, rank: RankConnection, request: rank_pb2.RankRequest) -> None:
        try:
            if request.HasField("join"):
                self._join(rank)
            elif self._set is not None and self._set.members.get(rank.rank) is rank:
                self._take(self._set, rank, request)
        except WeightplaneError as error:
            rank.refuse(error)
            if self._set is not None and self._pusher is None:
                # No set can come of it: the ranks that wait for this one need not wait.
                self._set.refuse(error)

    def rank_gone(self, rank: RankConnection, cause: str) -> None:
        ranks = self._set
        if ranks is None or not ranks.remove(rank, cause):
            return
        assert ranks.lost is not None, "the set just lost a rank"
        log.info("rank_gone", rank=rank.rank, cause=cause, left=len(ranks.members))
        if not rank.left:
            self._status_changed()
        if self._pusher is not None:
            self._pusher.fail(ranks.lost)
        elif not rank.left:
            ranks.refuse(ranks.lost)
        if self._devices is not None:
            self._devices.fail(ranks.lost)
        if ranks.ended:
            self._spawn(self._set_ended(ranks, on_purpose=rank.left))

    def _take(self, ranks: RankSet, rank: RankConnection, request: rank_pb2.RankRequest) -> None:
        if request.HasField("layout_part"):
            ranks.add_part(request.layout_part)
            self._when_complete(ranks)
        elif request.HasField("progress"):
            self._moved(ranks, rank, request.progress.step, request.progress.phase)
        elif self._pusher is not None and request.HasField("push_begin"):
            self._moved(ranks, rank, request.push_begin.step, "push")
            self._pusher.begin(rank, request.push_begin)
        elif self._devices is not None and request.HasField("devices"):
            self._devices.asked(rank, request.devices)
        elif self._pusher is not None:
            self._pusher.said(rank, request)

    def _moved(self, ranks: RankSet, rank: RankConnection, step: int, phase: str) -> None:
        ranks.moved(rank.rank, step, phase)
        if self._session is not None:
            self._session.moved()

    def _status_changed(self) -> None:
        if self._session is not None:
            self._session.changed()

    # ---- joining ----

    def _join(self, rank: RankConnection) -> None:
        if self.refusal is not None:
            rank.refuse(self.refusal, fenced=isinstance(self.refusal, StaleTerm))
            return
        join = rank.join
        if self._set is None or self._set.ended or join.restart_count > self._set.restart_count:
            self._new_set(join)
        assert self._set is not None, "just made"
        if join.restart_count < self._set.restart_count:
            raise FrameInvalid(message="Join", field="restart_count", problem=f"{join.restart_count} is over")
        self._set.add(rank)
        self._when_complete(self._set)

    def _new_set(self, join: rank_pb2.Join) -> None:
        """A new life. What is left of the last one is told so."""
        over = PeerLost(peer="this life of the trainer", cause=f"restart {join.restart_count} began")
        if self._pusher is not None:
            self._pusher.fail(over)
        if self._set is not None:
            self._set.refuse(over)
        self._set, self._pusher, self._waits_for = RankSet(join, self._settings.model), None, None
        self._set.holds_devices, self._devices = True, None  # an earlier life may: until it found out, see welcomed
        self.ended.clear()
        self._spawn(self._join_limit(self._set, join.timeout_seconds))

    def _when_complete(self, ranks: RankSet) -> None:
        if not ranks.complete or ranks.opened:
            return
        error = ranks.disagreement()
        if error is not None:
            ranks.refuse(error)
            return
        ranks.opened = True
        self._spawn(self._open_session(ranks))

    async def _open_session(self, ranks: RankSet) -> None:
        if self._session is not None:
            await self._session.close(None)
        life = ranks.incarnation
        try:
            run_id = self._run_id or await discover_run(
                self._stubs.fleet,
                ranks.model,
                lambda error: self.waiting(life, error),
                Reached(self._settings.coordinator, self._settings.tls),
            )
        except WeightplaneError as error:
            self.refused(life, error)
            return
        self._run_id = run_id
        settings = self._settings
        hello = ranks.hello(run_id, settings.trainer_id, settings.chunk_bytes, settings.link_host)
        hello.ended_incarnation = self._life.ended_incarnation()
        hello.takeover = self._settings.takeover
        reached = Reached(settings.coordinator, settings.tls)
        self._session = FleetSession(self._stubs.fleet, hello, ranks.status, self, reached)
        self._session.start()

    async def _join_limit(self, ranks: RankSet, seconds: float) -> None:
        """Ranks that wait in vain are told for what."""
        await asyncio.sleep(seconds)
        if self._set is not ranks or ranks.ended or ranks.term:
            return
        absent = f"ranks {ranks.missing}" if ranks.missing else f"the lease ({self._waits_for or 'no answer yet'})"
        late = DeadlineExceeded(phase="join", waited_for=absent, waited_seconds=seconds)
        ranks.refuse(self._waits_for if isinstance(self._waits_for, LeaseHeld) else late)

    async def _set_ended(self, ranks: RankSet, *, on_purpose: bool) -> None:
        """Nobody is left: end the push, then sweep; engines may have read dead ranks' segments until now."""
        if self._pusher is not None:
            await self._pusher.idle()
        if on_purpose:
            if self._devices is not None:
                await self._devices.left()
            await self._finish_checkpoint()
        segments.sweep()
        if self._set is not ranks:
            return
        if on_purpose and self._session is not None:
            await self._session.close("the ranks left")
        self.ended.set()

    async def _finish_checkpoint(self) -> None:
        """Before the lease is given back: it is published under it. One of a fenced trainer is of no use."""
        if self._checkpoints is not None:
            await self._checkpoints.finish(FINISH_SECONDS if self.refusal is None else 0.0)

    # ---- what the coordinator says (SessionEvents) ----

    def welcomed(self, incarnation: str, welcome: fleet_pb2.Welcome) -> None:
        ranks = self._set
        if ranks is None or ranks.incarnation != incarnation:
            return
        first, ranks.term, self._waits_for = ranks.term == 0, welcome.trainer_term, None
        log.info("lease_held", model=ranks.model, term=ranks.term, coordinator_term=welcome.coordinator_term)
        if first:
            self._life.begin(incarnation, self.pids)
            context = self._context(ranks)
            sharing = TimeSharing(ranks, context, self._settings.trainer_id, self._status_changed)
            self._devices = DeviceCalls(ranks, sharing)
            self._pusher = Pusher(ranks, context, lambda error: self.refused(incarnation, error), sharing.wake_weights)
            self._spawn(self._joined(ranks, sharing))

    async def _joined(self, ranks: RankSet, sharing: TimeSharing) -> None:
        """Ranks hear it with what an earlier life left asleep."""
        try:
            await sharing.find_out(FIND_OUT_SECONDS)
        except WeightplaneError as error:
            ranks.refuse(error)
            return
        joined = rank_pb2.Joined(term=ranks.term, run_id=self._run_id, holds_devices=ranks.holds_devices)
        ranks.send(rank_pb2.RankResponse(joined=joined))

    def waiting(self, incarnation: str, error: WeightplaneError) -> None:
        if self._set is not None and self._set.incarnation == incarnation:
            self._waits_for = error

    def refused(self, incarnation: str, error: WeightplaneError) -> None:
        """Fenced, or not wanted. Every rank hears it, now or at its next word."""
        ranks = self._set
        if ranks is None or ranks.incarnation != incarnation:
            return
        log.error("trainer_refused", reason=error.reason, cause=str(error))
        self.refusal = error
        self.refused_event.set()
        if self._pusher is not None:
            self._pusher.fail(error)
        if self._devices is not None:
            self._devices.fail(error)
        ranks.refuse(error, fenced=isinstance(error, StaleTerm))

    def _context(self, ranks: RankSet) -> PushContext:
        assert ranks.layout is not None, "a complete set has one"
        return PushContext(
            stubs=self._stubs,
            run_id=self._run_id,
            model=ranks.model,
            layout=ranks.layout,
            parts=tuple(ranks.parts),
            chunk_bytes=self._settings.chunk_bytes,
            world_size=ranks.world_size,
            fenced=lambda fence: self.refused(ranks.incarnation, fence),
            checkpoints=self._checkpoints,
            avoided=self._avoided,
            link_host=self._settings.link_host,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _checkpoints(settings: TrainerSettings) -> CheckpointKeeper | None:
    if settings.checkpoint_root is None:
        return None
    return CheckpointKeeper(settings.checkpoint_root, every=settings.checkpoint_every, keep=settings.checkpoint_keep)

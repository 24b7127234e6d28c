"""One push of a simulated trainer: begin, feed every engine, watch the update, say who may go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.assembly import Record
from controlplane.core.pauses import PauseMode, PausePolicy
from controlplane.core.plan import Apply, Assignment, Transport
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId
from controlplane.sim.coordinator import Begun, Watch
from controlplane.sim.kernel import Stream, connect
from controlplane.sim.settings import checksum, digest_of
from controlplane.sim.update_stream import ChunkFrame, UpdateStream, Writer

if TYPE_CHECKING:
    from controlplane.sim.agent import Life
    from controlplane.sim.trainer import Trainer

RPC_SECONDS = 2.0
RETRY_SECONDS = (0.1, 0.6)
REFUSAL_SECONDS = 0.5
STRAGGLER_SECONDS = 1.5
"""After a decision: how long engines that it did not wait for may take."""
AWAITED_SECONDS = 10.0
"""The same, of one that is awaited and streams: its bytes come after go, so only then is it waited for."""
LOOK_SECONDS = 0.1
PAUSES = (
    None,
    PausePolicy(PauseMode.ABORT),
    PausePolicy(PauseMode.WAIT, wait_seconds=0.6, fallback=PauseMode.KEEP),
    PausePolicy(PauseMode.WAIT, wait_seconds=0.3, fallback=PauseMode.ABORT),
)
NOBODY: frozenset[EngineId] = frozenset()
COMMITS = (Phase.GO, Phase.COMMITTED, Phase.DEGRADED)
"""Phases in which a commit frame may go."""


class Push:
    """One attempt, under one number."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.world = trainer.world
        self.layout = trainer.team.spec.layout
        self.content = self.world.next_content()
        self.begun: Begun | None = None
        self.phase = Phase.PREPARING
        self.over = False
        self.feeds: list[Feed] = []
        self.pause = self.world.kernel.rng.choice(PAUSES)
        """What becomes of the requests in the engines."""
        self._request_id = f"{trainer.incarnation}:{trainer.step}:{self.content}"
        self._avoid = tuple(trainer.broken.values())
        """Of this request, also when it is repeated."""

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.trainer.after(delay, lambda: None if self.over else action())

    def retry(self, action: Callable[[], None]) -> None:
        self.after(self.world.kernel.rng.uniform(*RETRY_SECONDS), action)

    # ---- begin ----

    def begin(self) -> None:
        stream = connect(self.trainer, self.world.coordinator)
        if stream is None:
            self.retry(self.begin)
            return
        coordinator, update_id = self.world.coordinator, self.world.coordinator.new_update_id()
        request = fe.UpdateRequested(
            update_id,
            self._request_id,
            self.world.settings.run_id,
            self.trainer.model,
            self.trainer.term,
            self.trainer.step,
            self.world.settings.push_limit,
            self.layout.digest,
            self.layout.byte_count,
            self._avoid,
        )
        stream.on_client_end = self._begin_failed
        stream.to_server(lambda: coordinator.begin(stream, request, lambda begun: self._begun(stream, begun)))

    def _begin_failed(self, error: e.WeightplaneError) -> None:
        if self.over or self.begun is not None:
            return
        if isinstance(error, e.StaleTerm):
            self.trainer.fence()
        if isinstance(error, e.RequestRepeated):  # its answer was lost, and meanwhile it was decided
            self.over = True
            self.trainer.push_over(self, committed=False)
        elif isinstance(error, (e.NoEngines, e.NotEnoughEngines)):  # a late word may have put them to sleep again
            self.retry(lambda: self.trainer.devices.give(self.begin))
        else:
            self.retry(self.begin)

    def _begun(self, stream: Stream, begun: Begun) -> None:
        stream.cancel()
        if self.over or self.begun is not None:
            return
        self.world.faults.point(self.trainer, "trainer.after_begin")
        self.begun = begun
        self.world.witness.wrote(self.trainer.model, begun.version, digest_of(self.content))
        self._watch()
        for assignment in begun.plan.assignments:
            feed = Feed(self, assignment)
            self.feeds.append(feed)
            feed.open()
        self.after(self.world.settings.push_limit, self._late)

    # ---- the decision ----

    def _watch(self) -> None:
        if self.phase.final or self.begun is None:
            return
        stream = connect(self.trainer, self.world.coordinator)
        if stream is None:
            self.retry(self._watch)
            return
        watch, update_id = Watch(stream, self._told), self.begun.update_id
        coordinator = self.world.coordinator
        stream.on_client_end = self._watch_failed
        stream.to_server(lambda: coordinator.watch(update_id, watch))

    def _watch_failed(self, error: e.WeightplaneError) -> None:
        if isinstance(error, e.UnknownUpdate):
            self._told(Phase.FAILED)
        elif not self.over:
            self.retry(self._watch)

    def _told(self, phase: Phase, lost: frozenset[EngineId] = NOBODY, awaited: frozenset[EngineId] = NOBODY) -> None:
        if self.over or self.phase.final:
            return
        self.phase = phase
        for feed in self.feeds:
            if phase in COMMITS and feed.engine_id not in lost:
                feed.commit()
            elif phase.final:
                feed.abort(f"the update is {phase.value}")
        if phase.final:
            patient = any(f.streams and f.engine_id in awaited for f in self.feeds)
            limit = AWAITED_SECONDS if patient else STRAGGLER_SECONDS
            self._wait_for_stragglers(self.world.kernel.now + limit if phase in COMMITS else 0.0)

    def _wait_for_stragglers(self, until: float) -> None:
        if any(f.working for f in self.feeds) and self.world.kernel.now < until:
            self.after(LOOK_SECONDS, lambda: self._wait_for_stragglers(until))
        else:
            self._end()

    def refused(self) -> None:
        """An engine would not take it: where it is required and no other moves, going on is senseless."""
        self.after(REFUSAL_SECONDS, self._judge_refusals)

    def _judge_refusals(self) -> None:
        still = any(f.working and not f.ready for f in self.feeds)
        if self.phase is Phase.PREPARING and not still and any(f.required and not f.working for f in self.feeds):
            self.give_up("an engine refused it")

    def _late(self) -> None:
        """The ranks' limit came first. After GO the decision is waited for."""
        if self.phase is Phase.PREPARING:
            self.give_up("the push's limit")

    def give_up(self, reason: str) -> None:
        assert self.begun is not None
        stream = connect(self.trainer, self.world.coordinator)
        if stream is None:
            self.retry(lambda: self.give_up(reason))
            return
        coordinator, update_id = self.world.coordinator, self.begun.update_id
        request = fe.AbortRequested(self.world.settings.run_id, update_id, self.trainer.term, reason)
        stream.to_server(lambda: coordinator.abort(stream, request, self._told))

    def _end(self) -> None:
        for feed in self.feeds:
            feed.abort("the push is over")
        self.over = True
        self.trainer.push_over(self, committed=self.phase in (Phase.COMMITTED, Phase.DEGRADED))


class Feed:
    """The way of one update to one engine, over as many streams as it takes."""

    def __init__(self, push: Push, assignment: Assignment) -> None:
        assert push.begun is not None
        self.push = push
        self.world = push.world
        self.engine_id = assignment.engine.engine_id
        self.begun = push.begun
        self.required = assignment.required
        self._incarnation = assignment.engine.incarnation
        self._transport = assignment.transport
        self.streams = assignment.apply is Apply.STREAMING
        """The engine installs chunks as they come, after go; else all are there before it says ready."""
        self._sent = 0
        self._stream: Stream | None = None
        self._remote: list[UpdateStream] = []
        self.ready = False
        self._committed = False
        self.working = True

    # ---- an attempt ----

    def open(self) -> None:
        if not self.working:
            return
        self.world.faults.point(self.push.trainer, "trainer.before_open")
        agent = self.world.agents[self.engine_id]
        stream = connect(self.push.trainer, agent)
        if stream is None:
            self.push.retry(self.open)
            return
        self._stream, self.ready, self._sent = stream, False, 0
        remote = self._remote = []
        stream.on_client_end = lambda error: self._failed(stream, error)
        writer = Writer(
            lambda layout, attached: self._accepted(stream, layout, attached),
            lambda: self._got_ready(stream),
            lambda: self._applied(stream),
            lambda: self._released(stream),
        )
        stream.to_server(lambda: self._deliver_open(agent.present, stream, remote, writer))

    def _deliver_open(self, life: Life, stream: Stream, remote: list[UpdateStream], writer: Writer) -> None:
        """At the agent: a call reaches whichever life it has now."""
        if not life.over:
            remote.append(life.accept(stream))
            remote[0].open(self._opened, writer)

    def _opened(self, number: int) -> ee.Opened:
        return ee.Opened(
            number,
            self.world.settings.run_id,
            self.push.trainer.model,
            self._incarnation,
            self.begun.update_id,
            self.push.trainer.term,
            self.begun.version,
            self.push.layout.digest,
            len(self.push.layout.tensors),
            self.push.layout.byte_count,
            engine_id=self.engine_id,
            streaming=self.streams,
            pause=self.push.pause,
        )

    def _to_agent(self, stream: Stream, act: Callable[[UpdateStream], None]) -> None:
        remote = self._remote
        stream.to_server(lambda: act(remote[0]) if remote else None)

    def _accepted(self, stream: Stream, layout_needed: bool, attached: bool) -> None:
        if stream is not self._stream:
            return
        if attached:
            self._committed = True
            return
        if layout_needed:
            layout = self.push.layout
            self._to_agent(stream, lambda s: s.layout(lambda: layout))
        if not self.streams:
            for frame in self._chunks():
                self._send(stream, frame)

    def _send(self, stream: Stream, frame: ChunkFrame) -> None:
        self.world.faults.point(self.push.trainer, "trainer.between_chunks")
        self._sent += 1
        self._to_agent(stream, lambda s: s.chunk(frame))

    def _chunks(self) -> list[ChunkFrame]:
        """One tensor each, the first in two parts."""
        first, last = (t.byte_count for t in self.push.layout.tensors)
        parts = [
            (Record(0, 0, 0, first // 2, None), 0),
            (Record(0, first // 2, 0, first - first // 2, checksum(self.push.content, 0)), 1),
            (Record(1, 0, 0, last, checksum(self.push.content, 1)), 2),
        ]
        return [
            ChunkFrame(
                partial(
                    ee.ChunkArrived,
                    version=self.begun.version,
                    index=index,
                    records=(record,),
                    buffer_bytes=record.byte_count,
                ),
                {record.tensor: self.push.content},
            )
            for record, index in parts
        ]

    def _got_ready(self, stream: Stream) -> None:
        if stream is self._stream:
            self.ready = True
            if self.push.phase in COMMITS:
                self.commit()

    def commit(self) -> None:
        """GO was told: the commit frame goes as soon as the engine is ready; to one that streams, chunks before it."""
        stream = self._stream
        if stream is None or not self.ready or self._committed or not self.working:
            return
        if self.streams:
            if not self._sent:
                self._send(stream, self._chunks()[0])
            return
        self._commit(stream)

    def _released(self, stream: Stream) -> None:
        """One is in: the next one goes, and after the last one the commit frame."""
        if stream is not self._stream or not self.working:
            return
        chunks = self._chunks()
        if self._sent < len(chunks):
            self._send(stream, chunks[self._sent])
        else:
            self._commit(stream)

    def _commit(self, stream: Stream) -> None:
        self.world.faults.point(self.push.trainer, "trainer.before_commit")
        self._committed = True
        version, digest, size = self.begun.version, digest_of(self.push.content), self.push.layout.byte_count
        self._to_agent(stream, lambda s: s.commit(version, 3, size, digest))
        self.world.faults.point(self.push.trainer, "trainer.after_commit")

    def _applied(self, stream: Stream) -> None:
        self.working = False

    # ---- its ends ----

    def _failed(self, stream: Stream, error: e.WeightplaneError) -> None:
        if stream is not self._stream or not self.working:
            return
        self._stream, self.ready = None, False
        if isinstance(error, e.StaleTerm):
            self.push.trainer.fence()
        broken = isinstance(error, e.PeerLost)
        if broken and self._transport is Transport.BROADCAST:
            failed = fe.Avoided(self.engine_id, self._incarnation, self._transport, str(error))
            self.push.trainer.broken[self.engine_id, self._incarnation] = failed
        in_the_weights = self.streams and bool(self._sent)  # it is poisoned, or about to be: the next push heals it
        passing = isinstance(error, (e.NotWelcomed, e.UpdateInProgress, e.UpdateAborted)) and not self._committed
        if (broken or passing) and not in_the_weights:
            self.push.retry(self.open)
        else:
            self.working = False
            self.push.refused()

    def abort(self, reason: str) -> None:
        """Given up before the commit frame; after it the agent owns the install and only the waiting ends."""
        stream, self._stream = self._stream, None
        self.working = False
        if stream is None:
            return
        if not self._committed:
            self._to_agent(stream, lambda s: s.abort(reason))
        self.push.trainer.after(0.5, stream.cancel)

    def cut(self) -> None:
        """Its connection breaks."""
        if self._stream is not None:
            self._stream.cut()

    def again(self) -> None:
        """The same update is opened a second time, while the first stream goes on by itself."""
        if self.working and self._stream is not None and not self._committed:
            self.open()

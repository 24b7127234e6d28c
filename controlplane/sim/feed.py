"""The way of one update from a simulated trainer to one engine: opened, fed, committed, and opened again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.assembly import Record
from controlplane.core.plan import Apply, Assignment, Transport
from controlplane.core.update_transaction import Phase
from controlplane.sim.kernel import Stream, connect
from controlplane.sim.settings import checksum, digest_of
from controlplane.sim.update_stream import ChunkFrame, UpdateStream, Writer

if TYPE_CHECKING:
    from controlplane.sim.agent import Life
    from controlplane.sim.push import Push

COMMITS = (Phase.GO, Phase.COMMITTED, Phase.DEGRADED)
"""Phases in which a commit frame may go."""


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

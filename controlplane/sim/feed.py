"""The way of one update from a simulated trainer to one engine: opened, fed, committed, and opened again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.assembly import Record
from controlplane.core.plan import Apply, Assignment, Transport
from controlplane.core.update_transaction import Phase
from controlplane.sim.agent import EngineLife
from controlplane.sim.frames import ChunkFrame, Writer
from controlplane.sim.kernel import Action, Stream, connect
from controlplane.sim.leaseholder import Leaseholder
from controlplane.sim.settings import checksum, digest_of
from controlplane.sim.shipment import Shipment
from controlplane.sim.update_stream import UpdateStream

COMMITS = (Phase.GO, Phase.COMMITTED, Phase.DEGRADED)
"""Phases in which a commit frame may go."""


class Feed:
    """The way of one update to one engine, over as many streams as it takes."""

    def __init__(
        self,
        trainer: Leaseholder,
        shipment: Shipment,
        assignment: Assignment,
        *,
        retry: Callable[[Action], None],
        refused: Action,
    ) -> None:
        """`retry` does it again later, while the push goes on; `refused`: the engine would not take it."""
        self.phase = Phase.PREPARING
        """Of the update, as its push was told."""
        self._trainer = trainer
        self._around = trainer.around
        self._shipment = shipment
        self._retry = retry
        self._refused = refused
        self.engine_id = assignment.engine.engine_id
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
        self._around.faults.point(self._trainer, "trainer.before_open")
        agent = self._trainer.team.agents[self.engine_id]
        stream = connect(self._trainer, agent)
        if stream is None:
            self._retry(self.open)
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

    def _deliver_open(self, life: EngineLife, stream: Stream, remote: list[UpdateStream], writer: Writer) -> None:
        """At the agent: a call reaches whichever life it has now."""
        if not life.over:
            remote.append(life.accept(stream))
            remote[0].open(self._opened, writer)

    def _opened(self, number: int) -> ee.Opened:
        return ee.Opened(
            number,
            self._around.settings.run_id,
            self._trainer.model,
            self._incarnation,
            self._shipment.begun.update_id,
            self._trainer.term,
            self._shipment.begun.version,
            self._shipment.layout.digest,
            len(self._shipment.layout.tensors),
            self._shipment.layout.byte_count,
            engine_id=self.engine_id,
            streaming=self.streams,
            pause=self._shipment.pause,
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
            layout = self._shipment.layout
            self._to_agent(stream, lambda s: s.layout(lambda: layout))
        if not self.streams:
            for frame in self._chunks():
                self._send(stream, frame)

    def _send(self, stream: Stream, frame: ChunkFrame) -> None:
        self._around.faults.point(self._trainer, "trainer.between_chunks")
        self._sent += 1
        self._to_agent(stream, lambda s: s.chunk(frame))

    def _chunks(self) -> list[ChunkFrame]:
        """One tensor each, the first in two parts."""
        first, last = (t.byte_count for t in self._shipment.layout.tensors)
        parts = [
            (Record(0, 0, 0, first // 2, None), 0),
            (Record(0, first // 2, 0, first - first // 2, checksum(self._shipment.content, 0)), 1),
            (Record(1, 0, 0, last, checksum(self._shipment.content, 1)), 2),
        ]
        return [
            ChunkFrame(
                partial(
                    ee.ChunkArrived,
                    version=self._shipment.begun.version,
                    index=index,
                    records=(record,),
                    buffer_bytes=record.byte_count,
                ),
                {record.tensor: self._shipment.content},
            )
            for record, index in parts
        ]

    def _got_ready(self, stream: Stream) -> None:
        if stream is self._stream:
            self.ready = True
            if self.phase in COMMITS:
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
        self._around.faults.point(self._trainer, "trainer.before_commit")
        self._committed = True
        version, digest, size = (
            self._shipment.begun.version,
            digest_of(self._shipment.content),
            self._shipment.layout.byte_count,
        )
        self._to_agent(stream, lambda s: s.commit(version, 3, size, digest))
        self._around.faults.point(self._trainer, "trainer.after_commit")

    def _applied(self, stream: Stream) -> None:
        self.working = False

    # ---- its ends ----

    def _failed(self, stream: Stream, error: e.WeightplaneError) -> None:
        if stream is not self._stream or not self.working:
            return
        self._stream, self.ready = None, False
        if isinstance(error, e.StaleTerm):
            self._trainer.fence()
        broken = isinstance(error, e.PeerLost)
        if broken and self._transport is Transport.BROADCAST:
            failed = fe.Avoided(self.engine_id, self._incarnation, self._transport, str(error))
            self._trainer.broken[self.engine_id, self._incarnation] = failed
        in_the_weights = self.streams and bool(self._sent)  # it is poisoned, or about to be: the next push heals it
        passing = isinstance(error, (e.NotWelcomed, e.UpdateInProgress, e.UpdateAborted)) and not self._committed
        if (broken or passing) and not in_the_weights:
            self._retry(self.open)
        else:
            self.working = False
            self._refused()

    def abort(self, reason: str) -> None:
        """Given up before the commit frame; after it the agent owns the install and only the waiting ends."""
        stream, self._stream = self._stream, None
        self.working = False
        if stream is None:
            return
        if not self._committed:
            self._to_agent(stream, lambda s: s.abort(reason))
        self._trainer.after(0.5, stream.cancel)

    def cut(self) -> None:
        """Its connection breaks."""
        if self._stream is not None:
            self._stream.cut()

    def again(self) -> None:
        """The same update is opened a second time, while the first stream goes on by itself."""
        if self.working and self._stream is not None and not self._committed:
            self.open()

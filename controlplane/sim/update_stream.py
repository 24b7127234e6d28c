"""One UpdateWeights stream at an engine agent: frames one after the other, checks that take time, one end.

Whatever ends it (an error, a break, silence, an abort frame) becomes one `StreamEnded`. Where the writer names a
checkpoint no chunk comes: the agent reads its files itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.layout import Layout
from controlplane.core.versions import UpdateId, WeightVersion
from controlplane.sim.engine import Staged
from controlplane.sim.frames import ChunkFrame, Writer
from controlplane.sim.kernel import Stream
from controlplane.sim.life import Life
from controlplane.sim.settings import checksum
from controlplane.sim.streaming import StreamingInstall
from controlplane.sim.surroundings import Surroundings
from controlplane.sim.work import EngineWork

CHECK_SECONDS = (0.005, 0.1)
READ_SECONDS = (0.01, 0.15)


class UpdateStream:
    """The agent's side."""

    def __init__(
        self,
        life: Life,
        work: EngineWork,
        around: Surroundings,
        stream: Stream,
        number: int,
        over: Callable[[int], None],
    ) -> None:
        """`over` is told its number when it ended."""
        self.life = life
        self.stream = stream
        self.number = number
        self._work = work
        self._around = around
        self._over = over
        self.writer: Writer | None = None
        self.layout_needed = False
        self._streams = False
        """It is a streaming update's: what comes is installed as it comes."""
        self._install: StreamingInstall | None = None
        self._reads: str | None = None
        """Name of the checkpoint whose files are the chunks."""
        self._frames: deque[Callable[[], None]] = deque()
        self._busy = False
        self._ended = False
        self._heard_at = around.kernel.now
        stream.on_server_end = lambda: self._end("the stream ended without a commit", "UPDATE_ABORTED")
        life.after(around.settings.stream_idle, self._watch_idle)

    # ---- frames ----

    def open(self, opened: Callable[[int], ee.Opened], writer: Writer, checkpoint: str | None = None) -> None:
        self.writer, self._reads = writer, checkpoint
        self._take(lambda: self._open(opened(self.number), writer))

    def layout(self, parts: Callable[[], Layout]) -> None:
        """`parts` puts together what came; what comes of it may be no layout."""
        self._take(lambda: self._layout(parts))

    def chunk(self, frame: ChunkFrame) -> None:
        self._take(lambda: self._chunk(frame))

    def commit(self, version: WeightVersion, chunks: int, byte_count: int, digest: bytes) -> None:
        event = ee.CommitArrived(self.number, version, chunks, byte_count, digest)
        self._take(lambda: self._commit(event))

    def abort(self, reason: str) -> None:
        self._take(lambda: self.fail(e.UpdateAborted(update_id="", cause=reason)))

    def _take(self, frame: Callable[[], None]) -> None:
        """Frames are read one after the other, and not while bytes are checked."""
        self._heard_at = self._around.kernel.now
        self._frames.append(frame)
        self._read()

    def _read(self) -> None:
        while self._frames and not self._busy and not self._ended and not self.life.over:
            try:
                self._frames.popleft()()
            except e.WeightplaneError as error:
                self.fail(error)

    # ---- what they mean ----

    def _open(self, event: ee.Opened, writer: Writer) -> None:
        accept = next(x for x in self.life.apply(event) if isinstance(x, fx.Accept))
        self.layout_needed = accept.layout_needed
        self.stream.to_client(lambda: writer.accepted(accept.layout_needed, accept.attached))
        self._around.faults.point(self.life.agent, "engine.after_open")
        if accept.attached:
            self._wait(event.update_id)
        else:
            self.life.staged[self.number] = Staged()
            self._streams = event.streaming
            if not accept.layout_needed:
                self._admit()
            if self._reads is not None:
                self._read_file(self._reads, 0, event.version)

    def _layout(self, parts: Callable[[], Layout]) -> None:
        self.life.apply(ee.LayoutArrived(self.number, parts()))
        self._admit()

    def _admit(self) -> None:
        """Of a streaming update: it would take the chunks, and touched nothing."""
        if self._streams and self.writer is not None:
            self.life.apply(ee.StreamAdmitted(self.number))
            self.stream.to_client(self.writer.ready)

    def _read_file(self, name: str, index: int, version: WeightVersion) -> None:
        """A file takes its time; it is there or not when it is opened."""
        wait = self._around.kernel.rng.uniform(*READ_SECONDS)
        self.life.after(wait, lambda: self._take(lambda: self._file(name, index, version)))

    def _file(self, name: str, index: int, version: WeightVersion) -> None:
        self._around.faults.point(self.life.agent, "engine.mid_read")
        written = self._around.shelf.get(name)
        if written is None:
            raise e.CheckpointUnreadable(name=name, cause=f"file {index} is gone")
        if index == 0 and self.layout_needed:
            self._layout(lambda: written.layout)
        self._chunk(written.frame(index, version))
        if index + 1 < written.file_count:
            self._read_file(name, index + 1, version)

    def _chunk(self, frame: ChunkFrame) -> None:
        event = frame.event(self.number)
        effects = self.life.apply(event)
        verify = next(x for x in effects if isinstance(x, fx.Verify))
        for start in (x for x in effects if isinstance(x, fx.StartStreaming)):
            self._install = self._work.streaming.start(start)
        self._busy = True
        seconds = self._around.kernel.rng.uniform(*CHECK_SECONDS) + self._around.faults.slow_check(self.life.agent.name)
        self.life.after(seconds, lambda: self._checked(frame, event, verify))

    def _checked(self, frame: ChunkFrame, event: ee.ChunkArrived, verify: fx.Verify) -> None:
        self._busy = False
        if self._ended:
            return
        try:
            self._check(frame, event)
            self._around.faults.point(self.life.agent, "engine.between_chunks")
            if self._install is None:
                self._received(verify)
            elif verify.tensors:
                self._busy = True
                self._install.put(lambda: self._put(verify))
            else:
                self._put(verify)
        except e.WeightplaneError as error:
            self.fail(error)
        self._read()

    def _received(self, verify: fx.Verify) -> None:
        if verify.last:
            self.life.apply(ee.BytesVerified(self.number))
            assert self.writer is not None
            self.stream.to_client(self.writer.ready)

    def _put(self, verify: fx.Verify) -> None:
        """Of a streaming update: it is in the engine."""
        self._busy, self._heard_at = False, self._around.kernel.now
        if self._ended:
            return
        if verify.last:
            self.life.apply(ee.BytesVerified(self.number))
        assert self.writer is not None
        self.stream.to_client(self.writer.released)
        self._read()

    def _check(self, frame: ChunkFrame, event: ee.ChunkArrived) -> None:
        staged, update = self.life.staged.get(self.number), self.life.core.update
        if staged is None or update is None or update.assembly is None or update.stream != self.number:
            raise e.UpdateAborted(update_id="", cause="the update ended meanwhile")
        staged.chunks += 1
        for record in event.records:
            staged.byte_count += record.byte_count
            content = frame.contents[record.tensor]
            if record.checksum is not None and record.checksum != checksum(content, record.tensor):
                name = update.assembly.layout.tensors[record.tensor].name
                really = checksum(content, record.tensor).hex()
                raise e.ChecksumMismatch(name=name, expected=record.checksum.hex(), got=really)
            staged.contents[record.tensor] = content

    def _commit(self, event: ee.CommitArrived) -> None:
        effects = self.life.apply(event)
        if self._install is not None:
            self._install.finish()
            self._wait(next(x for x in effects if isinstance(x, fx.FinishStreaming)).update.update_id)
            return
        start = next(x for x in effects if isinstance(x, fx.StartInstall))
        self._work.installs.start(start)
        self._wait(start.update.update_id)

    def _wait(self, update_id: UpdateId) -> None:
        self.life.wait_for(update_id, self._decided)

    def _decided(self, error: e.WeightplaneError | None) -> None:
        if self._ended:
            return
        if error is not None:
            self.fail(error)
            return
        assert self.writer is not None
        self.stream.to_client(self.writer.applied)
        self._end("it is done", "")

    # ---- its end ----

    def fail(self, error: e.WeightplaneError) -> None:
        """Ends it with an answer."""
        if not self._ended:
            self._around.witness.refused(error)
            self.stream.refuse(error)
            self._end(str(error), error.reason)

    def _end(self, cause: str, reason: str) -> None:
        if self._ended or self.life.over:
            return
        self._ended = True
        self._over(self.number)
        self.life.apply(ee.StreamEnded(self.number, cause, reason))

    def _watch_idle(self) -> None:
        life = self.life
        if self._ended:
            return
        silent = self._around.kernel.now - self._heard_at
        limit = self._around.settings.stream_idle
        update = life.core.update
        installing = self._busy or (update is not None and update.committed)
        if silent >= limit - 1e-6 and not installing:
            self.fail(e.UpdateAborted(update_id="", cause=f"no frame for {limit} s"))
        else:
            life.after(limit if installing else max(limit - silent, 0.1), self._watch_idle)

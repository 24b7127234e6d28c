"""One UpdateWeights stream: brings one version to one engine, as often as it takes until the update is decided.

Promises: a commit frame goes only after `ready` and after the coordinator's GO (INV-3), and so does the first chunk of
a streaming update, which is the start of its install (INV-1); a stream that ends in any other way is an abort. The
stream's fate is no report of what the engine holds (INV-8); what it does tell is whether somebody may still read the
leader's memory (INV-12).
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass

import structlog

from controlplane import failpoints, tracing
from controlplane.core.errors import (
    DeadlineExceeded,
    FrameOutOfOrder,
    NotWelcomed,
    UpdateAborted,
    UpdateInProgress,
    WeightplaneError,
)
from controlplane.rpc.errors import RemoteError
from controlplane.rpc.metrics import SENT_BYTES, transport_label
from trainer_agent.agent import spans
from trainer_agent.agent.answers import (
    ABORT_SECONDS,
    MAX_HEARD,
    Frames,
    Outgoing,
    Request,
    accepted_frame,
    expect,
    hear_all,
    typed,
)
from trainer_agent.agent.chunk_log import ChunkLog
from trainer_agent.agent.reasons import TRANSIENT_CODES
from trainer_agent.agent.session import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS
from trainer_agent.agent.stubs import WeightUpdates
from trainer_agent.agent.watch import UpdateWatch
from trainer_agent.agent.ways import Way, make_way
from trainer_agent.transports import traits_of
from weightplane.v1 import fleet_pb2, weight_update_pb2

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Cargo:
    """What is the same on all streams of an update."""

    open: weight_update_pb2.UpdateOpen
    """Without engine and transport."""
    layout_parts: tuple[weight_update_pb2.LayoutPart, ...]
    """Without version."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How the last attempt ended."""

    error: WeightplaneError | None
    """None: `applied` came."""
    memory_free: bool
    """Certainly nobody reads the leader's segments for this stream any more (INV-12)."""


class EngineStream:
    """The way of one update to one engine."""

    def __init__(
        self,
        stub: WeightUpdates,
        cargo: Cargo,
        assignment: fleet_pb2.Assignment,
        chunks: ChunkLog,
        watch: UpdateWatch,
    ) -> None:
        self.engine_id = assignment.engine.engine_id
        self.required = assignment.required
        self.streaming = assignment.apply == weight_update_pb2.APPLY_STREAMING
        self.ready = False
        """All bytes are in and checked there; of a streaming update: it would take them."""
        self._received = False
        self.error: WeightplaneError | None = None
        """Why the latest attempt ended; what an abort of ours does to it is no news."""
        self._stub = stub
        self._cargo = cargo
        self._assignment = assignment
        self._chunks = chunks
        self._watch = watch
        self.way: Way = make_way(assignment, chunks)
        self._sent = 0
        self.sent_bytes = 0
        """Of this attempt's chunks, so far."""
        self._abort = asyncio.Event()
        self._abort_reason = ""
        self._commit_sent = False
        self.accepted = False
        """Some attempt was; from then on another one needs the chunks from the first on."""
        self._opened = False
        """In this attempt the open frame went out: only then can it be given up by a word."""
        self._handed = False
        """In this attempt a handle was given away."""
        self._attempts = 0
        self._untold = False
        """An attempt before commit ended without the agent's word: it may still be reading what it was handed."""

    def abort(self, reason: str) -> None:
        """Give up before the commit frame; after it the agent owns the install, and only the waiting ends."""
        self._abort_reason = self._abort_reason or reason
        self._abort.set()

    def give_up(self, error: WeightplaneError) -> None:
        """Its bytes will not come any more."""
        self.error = self.error or error
        self.abort(str(error))

    @property
    def isolated(self) -> bool:
        """Its bytes come over a link of its own."""
        linked = traits_of(self._assignment.transport).by_link
        return linked and self._assignment.fate != weight_update_pb2.LINK_FATE_SHARED

    @property
    def fails_others(self) -> bool:
        """If it ends now, and not by our word, the other engines of its link get no bytes either."""
        linked = traits_of(self._assignment.transport).by_link
        return linked and not (self.isolated or self._received or self._abort.is_set())

    @property
    def fed(self) -> bool:
        """Its leader announced everything: the stream needs no rank any more."""
        return self._chunks.end is not None

    @property
    def delta(self) -> bool:
        """It brings what changed only."""
        return bool(self._chunks.delta)

    @property
    def holds_others_up(self) -> bool:
        """Its leader keeps two chunks only, and goes on when all engines have had them."""
        return self._chunks.ring

    async def run(self) -> StreamEnd:
        """Until `applied`, or an error that no further attempt can help. Never raises what the engine says."""
        pause, began, applied = FIRST_BACKOFF_SECONDS, asyncio.get_running_loop().time(), False
        try:
            while True:
                try:
                    await self._attempt()
                    applied = True
                    return StreamEnd(None, memory_free=True)
                except WeightplaneError as error:
                    log.info("stream_ended", engine_id=self.engine_id, reason=error.reason, cause=str(error))
                    self.ready = False
                    if self.error is None or not self._abort.is_set():
                        self.error = error
                if self._abort.is_set() or not self._again(self.error):
                    return StreamEnd(self.error, self._memory_free())
                await self._pause(pause)
                pause = min(pause * 2, MAX_BACKOFF_SECONDS)
        finally:
            self._chunks.mark_over()
            self.way.close()
            self._trace(began, applied=applied)

    def _trace(self, began: float, *, applied: bool) -> None:
        head = self._cargo.open
        of = spans.Of(head.run_id, head.update_id, head.version, head.writer_term)
        left = UpdateAborted(update_id=head.update_id, cause=self._abort_reason or "it was left behind")
        error = None if applied else self.error or left
        tracing.soon(spans.trace_send, of, self._assignment, began, self.sent_bytes, self._attempts, error)

    def _again(self, error: WeightplaneError) -> bool:
        """Bytes wait in the log, so an attempt costs little; the decision or the push's deadline ends them.

        Where the leader keeps two chunks only, all engines wait for the slowest: one that nobody needs is left behind.
        """
        if self.streaming and self._sent:
            return False  # it is poisoned, or about to be: the next push heals it
        if (self.accepted and not self.way.again) or (self._chunks.ring and not self.required):
            return False
        if isinstance(error, RemoteError):
            return error.code in TRANSIENT_CODES
        if self._commit_sent or self._watch.decided:
            return False
        return isinstance(error, (NotWelcomed, UpdateInProgress, UpdateAborted, DeadlineExceeded))

    def _memory_free(self) -> bool:
        return not self.way.hands_out or not (self._commit_sent or self._untold)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds * random.uniform(0.5, 1.0)):
                await self._abort.wait()

    async def _attempt(self) -> None:
        call = self._stub.UpdateWeights()
        frames: Frames = asyncio.Queue(MAX_HEARD)
        self._opened = self._handed = False
        self._attempts += 1
        self._sent = self.sent_bytes = 0
        hear, out = asyncio.create_task(hear_all(call, frames, self._let_go)), Outgoing(call)
        work = asyncio.create_task(self._work(out, frames))
        abort = asyncio.create_task(self._abort.wait())
        tasks = {hear, work, abort}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if hear.done() and hear.exception() is None:
                # The stream ended well: what it said last is still to be read.
                await asyncio.wait({work, abort}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.exception() is not None:
                raise await self._why(out, hear, work)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _why(self, out: Outgoing, hear: asyncio.Task[None], work: asyncio.Task[None]) -> WeightplaneError:
        """What ended the attempt, the engine agent's own word first; gives the stream up if it is still open."""
        ours = work.exception() if work.done() else None
        if not hear.done() and not self._commit_sent:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if self._opened:
                await out.say_abort(self._cargo.open.version, self._abort_reason or str(ours))
                await asyncio.wait({hear}, timeout=ABORT_SECONDS)
        told = hear.exception() if hear.done() else None
        error = typed(told or ours)
        # A clean end or an ErrorInfo is the agent's own word that it reads no more; a broken connection is nobody's.
        if self._handed and (not hear.done() or (told is not None and isinstance(typed(told), RemoteError))):
            self._untold = True
        if self._abort_reason and isinstance(error, RemoteError):
            return UpdateAborted(update_id=self._cargo.open.update_id, cause=self._abort_reason)
        return error

    async def _work(self, out: Outgoing, frames: Frames) -> None:
        failpoints.hit("trainer.before_open")
        await out.write(Request(open=await self._open()))
        self._opened = True
        accepted = await accepted_frame(frames, self.way.accept_seconds)
        self.accepted = True
        failpoints.hit("trainer.after_open")
        if not accepted.attached:
            self._untold = False  # one attempt at a time: the agent let go of what earlier ones handed it
            if accepted.layout_needed:
                await self._send_layout(out)
            if self.streaming:
                await self._await_go(frames)
                await self._send_chunks(out)
            else:
                await self._send_chunks(out)
                await self._await_go(frames)
            self._received = True
            failpoints.hit("trainer.before_commit")
            self._commit_sent = True
            await out.write(Request(commit=self._commit()))
            failpoints.hit("trainer.after_commit")
        self._commit_sent = True
        await expect(frames, "applied")

    async def _await_go(self, frames: Frames) -> None:
        await expect(frames, "ready")
        self.ready = True
        self._received = not self.streaming
        await self._watch.go()

    async def _open(self) -> weight_update_pb2.UpdateOpen:
        frame = weight_update_pb2.UpdateOpen()
        frame.CopyFrom(self._cargo.open)
        frame.engine.CopyFrom(self._assignment.engine)
        frame.transport, frame.apply = self._assignment.transport, self._assignment.apply
        if await self._chunks.chosen():
            frame.manifest.base.CopyFrom(self._assignment.base)
        await self.way.prepare(frame)
        return frame

    async def _send_layout(self, out: Outgoing) -> None:
        for part in self._cargo.layout_parts:
            bound = weight_update_pb2.LayoutPart()
            bound.CopyFrom(part)
            bound.version.CopyFrom(self._cargo.open.version)
            await out.write(Request(layout_part=bound))

    async def _send_chunks(self, out: Outgoing) -> None:
        """Flow control is gRPC's: a write waits until the agent reads."""
        self._sent = self.sent_bytes = 0
        sent = SENT_BYTES.labels(transport_label(self._assignment.transport))
        index = 0
        while (chunk := await self._chunks.chunk(index)) is not None:
            for frame in self.way.cut(chunk):
                head = weight_update_pb2.Chunk(
                    version=self._cargo.open.version, index=self._sent, last=self.delta and not chunk.records
                )
                self._handed = self.way.hands_out
                await out.write(frame.message(head))
                self._sent += 1
                size = sum(r.byte_count for r in frame.records)
                self.sent_bytes += size
                sent.inc(size)
                failpoints.hit("trainer.between_chunks", self._sent)
            self.way.sent(index)
            index += 1

    def _let_go(self, index: int) -> None:
        """Raises FrameOutOfOrder: it was never sent."""
        if index > self._sent:  # that of a chunk may come before the word that it was written
            raise FrameOutOfOrder(expected=f"a release of one of {self._sent + 1} chunks", got=f"chunk {index}")
        self.way.let_go(index)

    def _commit(self) -> weight_update_pb2.Commit:
        end = self._chunks.end
        assert end is not None, "all chunks were sent, so the end is known"
        return weight_update_pb2.Commit(
            version=self._cargo.open.version,
            chunk_count=self._sent,
            byte_count=end.byte_count,
            content_digest=end.content_digest,
        )

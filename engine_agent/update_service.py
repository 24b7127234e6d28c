"""weightplane.v1.WeightUpdate: frames in, events to the core, answers out.

The stream carries an attempt up to its commit frame; then the agent's install goes on without it. An end of the
stream, a broken connection and silence are the same thing here: an abort, unless the commit frame came (INV-3).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import structlog

from controlplane import failpoints
from controlplane.core import engine_events as events
from controlplane.core import errors as e
from controlplane.core.assembly import Record
from controlplane.core.engine_state import Held
from controlplane.core.versions import Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from controlplane.devices import host_id
from controlplane.rpc.codec import layout_from_parts, version_from_proto, version_to_proto
from controlplane.rpc.engine_codec import timings_to_proto
from engine_agent.life import Applied, EngineLife, EngineLifeHolder
from engine_agent.receivers import Buffer, Receiver, make_receiver
from weightplane.v1 import layout_pb2, weight_update_pb2, weight_update_pb2_grpc

log = structlog.get_logger(__name__)

Frames = AsyncIterator[weight_update_pb2.UpdateWeightsRequest]
Response = weight_update_pb2.UpdateWeightsResponse
READY_IDLE_SECONDS = 600.0
"""Longest wait for the commit frame once all bytes are in; above the coordinator's own limit for go."""
MAX_LAYOUT_TENSORS = 1_000_000
"""As the manifest's own limit."""


class WeightUpdateService(weight_update_pb2_grpc.WeightUpdateServicer):
    """Serves whichever life the engine has now."""

    def __init__(self, holder: EngineLifeHolder, stream_idle_seconds: float) -> None:
        self._holder = holder
        self._idle_seconds = stream_idle_seconds

    async def UpdateWeights(self, request_iterator: Frames, context: Any) -> AsyncIterator[Response]:
        life = self._holder.life
        stream, ended = life.new_stream()
        attempt = _Attempt(life, stream, _Reader(request_iterator, ended, self._idle_seconds))
        cause, reason = "the stream ended without a commit", "UPDATE_ABORTED"
        try:
            async for response in attempt.run():
                yield response
        except e.UpdateAborted as error:
            # Those who noticed may not know which update it was.
            cause = error.cause
            raise e.UpdateAborted(update_id=error.update_id or attempt.update_id, cause=cause) from error
        except e.WeightplaneError as error:
            cause, reason = str(error), error.reason
            raise
        finally:
            life.end_stream(stream, cause, reason)


class _Reader:
    """The next frame, within the idle limit; or the error with which another event ended the stream."""

    def __init__(self, frames: Frames, ended: asyncio.Future[e.WeightplaneError], idle_seconds: float) -> None:
        self._frames = aiter(frames)
        self._ended = ended
        self._idle_seconds = idle_seconds

    async def next(self, *, ready: bool = False) -> weight_update_pb2.UpdateWeightsRequest | None:
        """None at the end of the stream. Raises the ending error, or UpdateAborted after silence.

        `ready`: only the commit is missing, which waits for the slowest engine of the fleet.
        """
        limit = READY_IDLE_SECONDS if ready else self._idle_seconds
        frame = asyncio.ensure_future(self._next_or_none())
        try:
            ends: set[asyncio.Future[Any]] = {frame, self._ended}
            await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise self._ended.result()
            if not frame.done():
                raise e.UpdateAborted(update_id="", cause=f"no frame for {limit} s")
            return frame.result()
        finally:
            frame.cancel()

    async def _next_or_none(self) -> weight_update_pb2.UpdateWeightsRequest | None:
        return await anext(self._frames, None)


class _Attempt:
    """One stream."""

    def __init__(self, life: EngineLife, stream: int, reader: _Reader) -> None:
        self._life = life
        self._stream = stream
        self._reader = reader
        self._receiver: Receiver | None = None
        self.update_id = ""

    async def run(self) -> AsyncIterator[Response]:
        opened = await self._open_frame()
        version = version_from_proto(opened.version)
        accept = _only(events.Accept, self._life.apply(_opened(self._stream, opened)))
        yield _accepted(version, accept)
        update_id = UpdateId(opened.update_id)
        self.update_id = opened.update_id
        if not accept.attached:
            if accept.layout_needed:
                await self._read_layout(opened.manifest.tensor_count)
            self._begin_receiving(opened.transport)
            async for response in self._receive(version):
                yield response
        yield _applied(version, await self._life.outcome(update_id))

    async def _open_frame(self) -> weight_update_pb2.UpdateOpen:
        frame = await self._reader.next()
        if frame is None or frame.WhichOneof("frame") != "open":
            got = "the end" if frame is None else str(frame.WhichOneof("frame"))
            raise e.FrameOutOfOrder(expected="open", got=got)
        return frame.open

    async def _read_layout(self, tensor_count: int) -> None:
        parts: list[weight_update_pb2.LayoutPart] = []
        tensors = 0
        while not parts or len(parts) < parts[0].count:
            frame = await self._reader.next()
            if frame is None or frame.WhichOneof("frame") != "layout_part":
                got = "the end" if frame is None else str(frame.WhichOneof("frame"))
                raise e.FrameOutOfOrder(expected=f"layout part {len(parts)}", got=got)
            part = frame.layout_part
            if part.index != len(parts) or (parts and part.count != parts[0].count):
                raise e.FrameOutOfOrder(expected=f"layout part {len(parts)}", got=f"part {part.index}/{part.count}")
            tensors += len(part.tensors)
            if tensors > min(tensor_count, MAX_LAYOUT_TENSORS):
                raise e.LimitExceeded(what="tensors of the layout", limit=tensor_count, got=tensors)
            parts.append(part)
        layout = await asyncio.to_thread(layout_from_parts, parts)
        self._life.apply(events.LayoutArrived(self._stream, layout))

    def _begin_receiving(self, transport: weight_update_pb2.Transport.ValueType) -> None:
        update = self._life.core.update
        facts = self._life.facts
        if update is None or update.assembly is None or facts is None:
            raise e.UpdateAborted(update_id="", cause="the engine's life ended")
        self._receiver = make_receiver(transport, update.assembly.layout, host_id(), facts.device_uuids)
        self._life.keep(self._stream, self._receiver)

    async def _receive(self, version: WeightVersion) -> AsyncIterator[Response]:
        """Chunks, until the commit frame was taken."""
        while True:
            update = self._life.core.update
            frame = await self._reader.next(ready=update is not None and update.verified)
            kind = frame.WhichOneof("frame") if frame is not None else None
            if frame is None:
                raise e.UpdateAborted(update_id="", cause="the stream ended without a commit")
            if kind == "chunk":
                async for response in self._take_chunk(version, frame.chunk):
                    yield response
            elif kind == "commit":
                self._commit(frame.commit)
                return
            elif kind == "abort":
                raise e.UpdateAborted(update_id="", cause=frame.abort.reason or "the writer gave up")
            else:
                raise e.FrameOutOfOrder(expected="chunk, commit or abort", got=str(kind))

    async def _take_chunk(self, version: WeightVersion, chunk: weight_update_pb2.Chunk) -> AsyncIterator[Response]:
        event = _chunk_event(self._stream, chunk)
        buffers = [_buffer(b) for b in chunk.buffers]
        verify = _only(events.Verify, self._life.apply(event))
        await asyncio.to_thread(self._place_and_check, event.records, buffers, verify.tensors)
        failpoints.hit("engine.between_chunks", chunk.index)
        assert self._receiver is not None
        if self._receiver.releases_at_once:
            yield _released(version, chunk.index)
        if verify.last:
            self._life.apply(events.BytesVerified(self._stream))
            yield Response(ready=weight_update_pb2.UpdateReady(version=version_to_proto(version)))

    def _place_and_check(self, records: Sequence[Record], buffers: Sequence[Buffer], tensors: tuple[int, ...]) -> None:
        """In a thread: copies and checksums, outside any pause."""
        receiver, update = self._receiver, self._life.core.update
        if receiver is None or update is None or update.assembly is None:
            raise e.UpdateAborted(update_id="", cause="the update ended meanwhile")
        receiver.place(records, buffers)
        for tensor in tensors:
            receiver.check(tensor, update.assembly.checksum(tensor))

    def _commit(self, commit: weight_update_pb2.Commit) -> None:
        event = events.CommitArrived(
            self._stream,
            version_from_proto(commit.version),
            commit.chunk_count,
            commit.byte_count,
            commit.content_digest,
        )
        self._life.start_install(_only(events.StartInstall, self._life.apply(event)))


def _only(kind: type, effects: list[events.Effect]) -> Any:
    return next(effect for effect in effects if isinstance(effect, kind))


def _opened(stream: int, message: weight_update_pb2.UpdateOpen) -> events.Opened:
    return events.Opened(
        stream=stream,
        run_id=RunId(message.run_id),
        model=ModelName(message.model),
        incarnation=Incarnation(message.engine.incarnation),
        update_id=UpdateId(message.update_id),
        writer_term=Term(message.writer_term),
        version=version_from_proto(message.version),
        layout_digest=message.manifest.layout_digest,
        tensor_count=message.manifest.tensor_count,
        byte_count=message.manifest.byte_count,
        by_coordinator=message.writer == weight_update_pb2.UPDATE_WRITER_COORDINATOR,
        base=_base(message.manifest),
    )


def _base(manifest: weight_update_pb2.Manifest) -> Held | None:
    """What a delta changes; None for a whole update."""
    if not manifest.HasField("base"):
        return None
    return Held(version_from_proto(manifest.base.version), manifest.base.content_digest)


def _chunk_event(stream: int, chunk: weight_update_pb2.Chunk) -> events.ChunkArrived:
    records = [
        Record(r.tensor, r.tensor_offset, r.buffer_offset, r.byte_count, r.checksum if r.HasField("checksum") else None)
        for r in chunk.records
    ]
    smallest = min(_size(b) for b in chunk.buffers)
    return events.ChunkArrived(stream, version_from_proto(chunk.version), chunk.index, records, smallest)


def _size(buffer: layout_pb2.BufferHandle) -> int:
    is_inline = buffer.WhichOneof("kind") == "inline"
    return len(buffer.inline) if is_inline else buffer.shared_memory.byte_count


def _buffer(buffer: layout_pb2.BufferHandle) -> Buffer:
    if buffer.WhichOneof("kind") == "inline":
        return Buffer(buffer.device_uuid, inline=buffer.inline)
    r = buffer.shared_memory
    return Buffer(buffer.device_uuid, r.segment, r.host_id, r.offset, r.byte_count)


def _accepted(version: WeightVersion, accept: events.Accept) -> Response:
    accepted = weight_update_pb2.UpdateAccepted(
        version=version_to_proto(version), layout_needed=accept.layout_needed, attached=accept.attached
    )
    return Response(accepted=accepted)


def _released(version: WeightVersion, index: int) -> Response:
    released = weight_update_pb2.ChunkReleased(version=version_to_proto(version), index=index)
    return Response(chunk_released=released)


def _applied(version: WeightVersion, applied: Applied) -> Response:
    message = weight_update_pb2.UpdateApplied(
        version=version_to_proto(version),
        content_digest=applied.content_digest,
        changed_tensors=applied.changed_tensors,
        timings=timings_to_proto(applied.timings),
        canary=weight_update_pb2.Canary(prompt_logprobs=applied.canary.prompt_logprobs, tokens=applied.canary.tokens),
    )
    return Response(applied=message)

"""One UpdateWeights stream at an engine agent: frames become events of its engine's core, effects become answers.

Promises: bytes are placed and checked outside of any pause; what the core refuses is refused before anything is
touched; what ends the stream ends the work that it began (INV-3).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from structlog.contextvars import bind_contextvars

from controlplane import failpoints, tracing
from controlplane.checkpoints import CheckpointManifest, read_manifest
from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core import errors as e
from controlplane.core.access import Role, check_role
from controlplane.core.assembly import Assembly, Record
from controlplane.core.engine_state import Activity
from controlplane.core.engine_update import Update
from controlplane.core.versions import UpdateId, WeightVersion
from controlplane.device_memory.ranges import ExportedProbe
from controlplane.devices import host_id
from controlplane.rpc.codec import layout_from_parts, version_from_proto
from controlplane.rpc.metrics import RECEIVED_BYTES, transport_label
from controlplane.rpc.security import caller
from engine_agent.engine import StagedWeights
from engine_agent.life import spans
from engine_agent.life.engine_life import EngineLife
from engine_agent.receivers import (
    NO_ROOM_NEEDED,
    PART_TRANSPORTS,
    WHOLE_TRANSPORTS,
    Buffer,
    CheckpointReceiver,
    Incoming,
    Receiver,
    make_part_receiver,
    make_receiver,
    require_received,
)
from engine_agent.receivers.links import ReceiverLink
from engine_agent.services import update_frames as frames
from engine_agent.services.entry import check_ids
from engine_agent.services.releases import HELD_SECONDS, Releases
from engine_agent.services.streamed_parts import StreamedParts
from engine_agent.services.update_reader import FrameReader, untimely
from engine_agent.threads import in_thread
from weightplane.v1 import weight_update_pb2

Response = weight_update_pb2.UpdateWeightsResponse
READER = "weightplane-checkpoint"
"""Name of the threads that read checkpoints."""
JOINER = "weightplane-link"
"""Name of the threads that join links."""
_WRITERS = {weight_update_pb2.UPDATE_WRITER_COORDINATOR: Role.COORDINATOR}
"""INV-7: the coordinator's term is the coordinator's own. Any other writer is a trainer."""
QUICK_BYTES = 4 << 20
"""Copied and summed in a millisecond or less: as long as a thread under load takes to begin."""


@dataclass(frozen=True, slots=True)
class Rules:
    """By which ways bytes may come."""

    checkpoint_root: Path | None
    transports: frozenset[weight_update_pb2.Transport.ValueType]
    """By which a writer may send."""

    def check(self, engine_id: str, opened: weight_update_pb2.UpdateOpen) -> None:
        """Raises UnsupportedByEngine: before anything is touched."""
        if opened.transport != weight_update_pb2.TRANSPORT_CHECKPOINT:
            require_received(engine_id, opened.transport, self.transports)
        if opened.apply == weight_update_pb2.APPLY_STREAMING:
            require_received(engine_id, opened.transport, PART_TRANSPORTS)
        elif opened.transport != weight_update_pb2.TRANSPORT_CHECKPOINT:
            require_received(engine_id, opened.transport, WHOLE_TRANSPORTS)


class UpdateAttempt:
    """One stream."""

    def __init__(self, life: EngineLife, stream: int, reader: FrameReader, rules: Rules) -> None:
        self._life = life
        self._stream = stream
        self._reader = reader
        self._rules = rules
        self._receiver: Receiver | None = None
        self._link: ReceiverLink | None = None
        self._exports: Sequence[ExportedProbe] = ()
        """Device memory that the workers have open for it."""
        self._assembly: Assembly | None = None
        self._transport = weight_update_pb2.TRANSPORT_UNSPECIFIED
        self._parts: StreamedParts | None = None
        """Of a streaming update: installed as they come."""
        self.update_id = ""
        self._began = time.monotonic()
        self._received: float | None = None
        """When everything was in and checked."""
        self._byte_count = 0
        self._opened: weight_update_pb2.UpdateOpen | None = None
        """Of an attempt that was accepted, and is to bring bytes."""

    async def run(self) -> AsyncIterator[Response]:
        opened = await self._reader.open()
        check_role(caller(), _WRITERS.get(opened.writer, Role.TRAINER))
        version = version_from_proto(opened.version)
        self._rules.check(self._life.core.state.engine_id, opened)
        event = frames.opened(self._stream, opened, self._life.base.account)
        self._check_reference(event)
        accept = _only(fx.Accept, self._life.apply(event))
        self.update_id = opened.update_id
        self._opened = None if accept.attached else opened
        # Of this call, and of the install that it may begin.
        bind_contextvars(**tracing.log_fields(opened.run_id, opened.update_id))
        self._transport = opened.transport
        if not accept.attached and opened.transport == weight_update_pb2.TRANSPORT_CHECKPOINT:
            root = self._root()
            yield frames.accepted(version)
            await self._reader.during(self._read_checkpoint(root, opened))
            yield frames.ready(version)
        else:
            if not accept.attached:
                await self._follow_link(opened)
                await self._open_exports(opened)
            yield frames.accepted(version, layout_needed=accept.layout_needed, attached=accept.attached)
        if not accept.attached:
            if self._receiver is None:
                await self._begin_receiving(opened, layout_needed=accept.layout_needed)
            if self._parts is not None:
                self._life.apply(events.StreamAdmitted(self._stream))
                yield frames.ready(version)
            async for response in self._receive(version):
                yield response
        yield frames.applied(version, await self._life.installs.outcome(UpdateId(opened.update_id)))

    def _check_reference(self, event: events.Opened) -> None:
        """Raises InvalidRequest: the engine could not be asked that. Before anything is touched."""
        facts, reference = self._life.facts, event.reference
        if facts is None or reference is None:
            return
        check_ids("manifest.reference", reference.prompt_token_ids, facts.vocab_size)
        if len(reference.prompt_token_ids) >= facts.max_model_len:
            problem = f"{len(reference.prompt_token_ids)} tokens of an engine's {facts.max_model_len} leave no room"
            raise e.InvalidRequest("manifest.reference", problem)

    async def _begin_receiving(self, opened: weight_update_pb2.UpdateOpen, *, layout_needed: bool) -> None:
        if layout_needed:
            parts = await self._reader.layout_parts(opened.manifest.tensor_count)
            layout = await asyncio.to_thread(layout_from_parts, parts)
            self._life.apply(events.LayoutArrived(self._stream, layout))
        update, facts = self._my_update(), self._life.facts
        if update.assembly is None or facts is None:
            raise e.UpdateAborted(update_id="", cause="the engine's life ended")
        self._assembly = update.assembly
        incoming = Incoming(
            opened.transport,
            update.assembly.layout,
            self._life.core.state.engine_id,
            host_id(),
            facts.device_uuids,
            self._link,
            self._base_of(update),
            self._life.spare,
            self._life.segments,
            self._exports,
        )
        if not update.streaming:
            self._keep(await self._made(incoming))
            return
        receiver = make_part_receiver(incoming)
        self._parts = StreamedParts(self._life, self._stream, receiver)
        self._keep(receiver)

    async def _made(self, incoming: Incoming) -> Receiver:
        """Room for a large model takes many seconds to make: not the loop's, which has heartbeats to send. That of a
        delta is made at once, while its base is certainly there; and what comes by reference needs none.

        Raises UpdateAborted: the update ended meanwhile.
        """
        if incoming.base is not None or incoming.transport in NO_ROOM_NEEDED:
            return make_receiver(incoming)
        making = asyncio.ensure_future(asyncio.to_thread(make_receiver, incoming))
        try:
            receiver = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close_made)
            raise
        try:
            self._my_update()
        except e.UpdateAborted:
            receiver.close()
            raise
        return receiver

    def _base_of(self, update: Update) -> StagedWeights | None:
        """Of a delta: the bytes that it changes."""
        if update.base is None:
            return None
        base = self._life.base.staged(update.base)
        if base is None:
            raise e.UpdateAborted(update_id=update.update_id, cause="the base that the delta changes is gone")
        return base

    def _keep(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._life.streams.keep(self._stream, receiver)

    def _my_update(self) -> Update:
        """The core's account of this stream. Raises UpdateAborted: it was ended meanwhile."""
        update = self._life.core.update
        if update is None or update.stream != self._stream:
            raise e.UpdateAborted(update_id="", cause="the update ended meanwhile")
        return update

    # ---- a link ----

    async def _follow_link(self, opened: weight_update_pb2.UpdateOpen) -> None:
        """Be in the link that the update names, or in none: a plan that names none has no more use for an old one."""
        links = self._life.links
        if opened.transport != weight_update_pb2.TRANSPORT_BROADCAST:
            links.close()
            return
        self._link = links.take(frames.link_place(opened))
        await self._reader.during(in_thread(self._link.join, name=JOINER))

    async def _open_exports(self, opened: weight_update_pb2.UpdateOpen) -> None:
        """Have the engine's workers open what the update names, before anything is touched; a plan that names nothing
        has no more use for what they have open. Raises IpcNotPossible."""
        if opened.transport == weight_update_pb2.TRANSPORT_CUDA_IPC:
            self._exports = frames.exports(opened)
        if self._exports or self._life.exports.any_open:
            await self._reader.during(self._life.exports.take(self._exports, opened.writer_term))

    def leave_link(self) -> None:
        """An update that ended before all of its bytes came leaves the link in the middle of something."""
        if self._link is not None:
            self._link.leave()

    # ---- a checkpoint ----

    def _root(self) -> Path:
        if self._rules.checkpoint_root is None:
            engine_id = self._life.core.state.engine_id
            raise e.UnsupportedByEngine(engine_id=engine_id, what="read checkpoints: it has no checkpoint_root")
        return self._rules.checkpoint_root

    async def _read_checkpoint(self, root: Path, opened: weight_update_pb2.UpdateOpen) -> None:
        """The whole version, without a frame of the writer's: one chunk for each file. Its version is not compared: a
        rollback brings an older one's bytes under a new number, and what counts is the content."""
        name = opened.checkpoint
        # In threads of their own: a disk that hangs must not hold up the end of this process.
        manifest = await in_thread(lambda: read_manifest(root, name), name=READER)
        _check_manifest(opened, manifest)
        if self._my_update().assembly is None:
            self._life.apply(events.LayoutArrived(self._stream, manifest.layout))
        self._assembly = self._my_update().assembly
        receiver = CheckpointReceiver(root, name, manifest)
        self._keep(receiver)
        version = version_from_proto(opened.version)
        for index, (records, size) in enumerate(await in_thread(receiver.open, name=READER)):
            event = events.ChunkArrived(self._stream, version, index, records, size)
            verify = _only(fx.Verify, self._life.apply(event))
            await in_thread(partial(self._check_read, receiver, index, verify.tensors), name=READER)
            self._count(size)
            failpoints.hit("engine.between_chunks", index)
        self._verified()

    def _check_read(self, receiver: Receiver, index: int, tensors: tuple[int, ...]) -> None:
        failpoints.hit("engine.reading_checkpoint", index)
        self._check(receiver, tensors)

    # ---- chunks ----

    async def _receive(self, version: WeightVersion) -> AsyncIterator[Response]:
        """Chunks, until the commit frame was taken."""
        releases = Releases(version, hold=self._transport == weight_update_pb2.TRANSPORT_INLINE)
        while True:
            if releases.held and not await self._reader.comes(HELD_SECONDS):
                yield releases.take()
            ready = self._life.core.state.activity is Activity.READY
            frame = await self._reader.next(ready=ready)
            kind = frame.WhichOneof("frame") if frame is not None else None
            if frame is not None and kind == "chunk":
                for response in await self._take_chunk(version, frame.chunk, releases):
                    yield response
            elif frame is not None and kind == "commit":
                self._commit(frame.commit)
                return
            else:
                raise untimely(frame)

    async def _take_chunk(
        self, version: WeightVersion, chunk: weight_update_pb2.Chunk, releases: Releases
    ) -> list[Response]:
        """What is to be said of it now."""
        buffers = frames.buffers(chunk, self._reader.payload)
        event = frames.chunk_event(self._stream, chunk, buffers)
        effects = self._life.apply(event)
        if self._parts is not None:
            self._parts.began(effects)
        verify = _only(fx.Verify, effects)
        await self._place(event.records, buffers, verify.tensors)
        self._count(sum(r.byte_count for r in event.records))
        failpoints.hit("engine.between_chunks", chunk.index)
        assert self._receiver is not None
        if self._parts is not None:
            await self._parts.install(event.records, verify.tensors)
        if self._receiver.releases_at_once if self._parts is None else self._parts.releases:
            releases.free(chunk.index)
        if not verify.last:
            return [releases.take()] if releases.due else []
        self._verified()
        released = [releases.take()] if releases.held else []
        return [*released, frames.ready(version)] if self._parts is None else released

    async def _place(self, records: Sequence[Record], buffers: Sequence[Buffer], tensors: tuple[int, ...]) -> None:
        """Where that is done sooner than a thread takes over, the loop itself does it."""
        assert self._receiver is not None
        assert self._assembly is not None
        checked = sum(self._assembly.layout.tensors[t].byte_count for t in tensors)
        if self._receiver.quick and sum(b.size for b in buffers) + checked <= QUICK_BYTES:
            self._place_and_check(records, buffers, tensors)
        else:
            await asyncio.to_thread(self._place_and_check, records, buffers, tensors)

    def _place_and_check(self, records: Sequence[Record], buffers: Sequence[Buffer], tensors: tuple[int, ...]) -> None:
        """Copies and checksums, outside any pause."""
        assert self._receiver is not None  # chunks come when it was made
        self._receiver.place(records, buffers)
        self._check(self._receiver, tensors)

    def trace(self, reason: str, cause: str) -> None:
        """The stream is over; `reason` is why, if its bytes never were all here."""
        if self._opened is not None:
            error = (reason, cause)
            facts = (self._opened, self._began, self._received, self._byte_count, error)
            tracing.soon(spans.trace_receive, self._life.core.state, *facts)

    def _verified(self) -> None:
        self._life.apply(events.BytesVerified(self._stream))
        self._received = time.monotonic()

    def _count(self, byte_count: int) -> None:
        self._byte_count += byte_count
        RECEIVED_BYTES.labels(transport_label(self._transport)).inc(byte_count)

    def _check(self, receiver: Receiver, tensors: tuple[int, ...]) -> None:
        assert self._assembly is not None
        for tensor in tensors:
            receiver.check(tensor, self._assembly.checksum(tensor))

    def _commit(self, commit: weight_update_pb2.Commit) -> None:
        event = events.CommitArrived(
            self._stream,
            version_from_proto(commit.version),
            commit.chunk_count,
            commit.byte_count,
            commit.content_digest,
        )
        effects = self._life.apply(event)
        if self._parts is None:
            self._life.installs.start(_only(fx.StartInstall, effects))
        else:
            self._parts.finish()


def _close_made(making: asyncio.Future[Receiver]) -> None:
    """Nobody waits for it any more."""
    if making.exception() is None:
        making.result().close()


def _only(kind: type, effects: list[fx.Effect]) -> Any:
    return next(effect for effect in effects if isinstance(effect, kind))


def _check_manifest(opened: weight_update_pb2.UpdateOpen, manifest: CheckpointManifest) -> None:
    """The checkpoint is of the run, model and layout that were announced. Raises CheckpointUnreadable."""
    pairs = [
        ("run", opened.run_id, manifest.run_id),
        ("model", opened.model, manifest.model),
        ("layout", opened.manifest.layout_digest.hex(), manifest.layout.digest.hex()),
    ]
    for what, expected, got in pairs:
        if expected != got:
            raise e.CheckpointUnreadable(opened.checkpoint, f"it is of {what} {got}, not of {expected}")

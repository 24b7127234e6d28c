"""Frames of WeightUpdate: the writer's into the core's events, the core's answers into the agent's. No decisions."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.core import engine_events as events
from controlplane.core.assembly import Record
from controlplane.core.canary import CanaryReference
from controlplane.core.engine_state import Held, KeptBase
from controlplane.core.errors import FrameInvalid, InvalidRequest
from controlplane.core.pauses import PausePolicy
from controlplane.core.plan import CAN_BE_DELTAS
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from controlplane.device_memory.ranges import ExportedProbe
from controlplane.rpc.codec import pause_from_proto, version_from_proto, version_to_proto
from controlplane.rpc.device_codec import probe_from_proto, range_from_proto
from controlplane.rpc.engine_codec import canary_to_proto, reference_from_proto, timings_to_proto
from controlplane.rpc.plan_codec import TRANSPORTS
from engine_agent.life.installing import Applied
from engine_agent.receivers import Buffer
from engine_agent.receivers.links import LinkPlace
from weightplane.v1 import layout_pb2, weight_update_pb2

Response = weight_update_pb2.UpdateWeightsResponse


DELTA_TRANSPORTS = frozenset(TRANSPORTS[t] for t in CAN_BE_DELTAS)
"""Those by which the bytes come to the agent; it alone can apply a delta."""


def opened(stream: int, message: weight_update_pb2.UpdateOpen, kept: KeptBase | None = None) -> events.Opened:
    """`kept`: what a delta could be applied to. Raises FrameInvalid: a delta by a transport that has none."""
    if message.manifest.HasField("base") and message.transport not in DELTA_TRANSPORTS:
        raise FrameInvalid("UpdateOpen", "transport", f"a delta comes by {' or '.join(t.value for t in CAN_BE_DELTAS)}")
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
        engine_id=EngineId(message.engine.engine_id),
        kept=kept,
        streaming=message.apply == weight_update_pb2.APPLY_STREAMING,
        reference=_reference(message.manifest),
        pause=_pause(message),
    )


def _base(manifest: weight_update_pb2.Manifest) -> Held | None:
    """What a delta changes; None for a whole update."""
    if not manifest.HasField("base"):
        return None
    return Held(version_from_proto(manifest.base.version), manifest.base.content_digest)


def _reference(manifest: weight_update_pb2.Manifest) -> CanaryReference | None:
    """Raises FrameInvalid: nothing could be compared with it."""
    if not manifest.HasField("reference"):
        return None
    reference = reference_from_proto(manifest.reference)
    problem = reference.problem()
    if problem:
        raise FrameInvalid("Manifest", "reference", problem)
    return reference


def _pause(message: weight_update_pb2.UpdateOpen) -> PausePolicy | None:
    """Raises InvalidRequest: before anything is touched."""
    if not message.HasField("pause"):
        return None
    policy = pause_from_proto(message.pause)
    if policy.problem_at_an_install:
        raise InvalidRequest("pause", policy.problem_at_an_install)
    return policy


def link_place(message: weight_update_pb2.UpdateOpen) -> LinkPlace:
    """Raises FrameInvalid: the frame names no link, or no place in it."""
    if not message.HasField("link"):
        raise FrameInvalid("UpdateOpen", "link", "a broadcast names its link")
    link = message.link
    if link.position >= link.size:
        raise FrameInvalid("Link", "position", f"{link.position} of {link.size} members, counted from 0")
    return LinkPlace(link.link_id, link.rendezvous, link.size, link.position, message.writer_term)


def exports(message: weight_update_pb2.UpdateOpen) -> list[ExportedProbe]:
    """Raises FrameInvalid: the frame names none, or another kind of memory."""
    if not message.exports or any(e.probe.WhichOneof("kind") != "cuda_ipc" for e in message.exports):
        raise FrameInvalid("UpdateOpen", "exports", "cuda_ipc names what each device's worker has to open")
    probes = [probe_from_proto(e) for e in message.exports]
    if not all(p.range.export_id and p.range.inside for p in probes):
        raise FrameInvalid("UpdateOpen", "exports", "a probe lies in its allocation, which has an id")
    return probes


def chunk_event(stream: int, chunk: weight_update_pb2.Chunk, buffers: Sequence[Buffer]) -> events.ChunkArrived:
    """`buffers`: the chunk's own."""
    records = [_record(r) for r in chunk.records]
    smallest = min(b.size for b in buffers)
    return events.ChunkArrived(
        stream, version_from_proto(chunk.version), chunk.index, records, smallest, last=chunk.last
    )


def _record(r: weight_update_pb2.TensorRecord) -> Record:
    return Record(
        tensor=r.tensor,
        tensor_offset=r.tensor_offset,
        buffer_offset=r.buffer_offset,
        byte_count=r.byte_count,
        checksum=r.checksum if r.HasField("checksum") else None,
        changed_elements=r.changed_elements if r.HasField("changed_elements") else None,
    )


def buffers(chunk: weight_update_pb2.Chunk, payload: memoryview | None) -> list[Buffer]:
    """The chunk's. `payload`: the inline bytes of its one buffer, which is empty then."""
    if payload is not None:
        return [Buffer("", inline=payload)]
    return [_buffer(b) for b in chunk.buffers]


def _buffer(buffer: layout_pb2.BufferHandle) -> Buffer:
    """A kind that no receiver of ours takes has no place, and is refused by all of them."""
    match buffer.WhichOneof("kind"):
        case "inline":
            return Buffer(buffer.device_uuid, inline=buffer.inline)
        case "link":
            return Buffer(buffer.device_uuid, link_bytes=buffer.link.byte_count)
        case "cuda_ipc":
            return Buffer(buffer.device_uuid, device=range_from_proto(buffer))
        case _:
            r = buffer.shared_memory
            return Buffer(buffer.device_uuid, r.segment, r.host_id, r.offset, r.byte_count)


def accepted(version: WeightVersion, *, layout_needed: bool = False, attached: bool = False) -> Response:
    accepted = weight_update_pb2.UpdateAccepted(
        version=version_to_proto(version), layout_needed=layout_needed, attached=attached
    )
    return Response(accepted=accepted)


def ready(version: WeightVersion) -> Response:
    return Response(ready=weight_update_pb2.UpdateReady(version=version_to_proto(version)))


def released(version: WeightVersion, index: int) -> Response:
    released = weight_update_pb2.ChunkReleased(version=version_to_proto(version), index=index)
    return Response(chunk_released=released)


def applied(version: WeightVersion, applied: Applied) -> Response:
    message = weight_update_pb2.UpdateApplied(
        version=version_to_proto(version),
        content_digest=applied.content_digest,
        changed_tensors=applied.changed_tensors,
        timings=timings_to_proto(applied.timings),
        canary=None if applied.canary is None else canary_to_proto(applied.canary),
        tensor_count=applied.report.loaded_tensors,
    )
    return Response(applied=message)

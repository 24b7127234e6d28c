"""How each service reads a message, without the service: parsed, validated, and made into what the cores take.

Only refusals of the contract may come of any bytes: DecodeError for what is no message, else a WeightplaneError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message_factory import GetMessageClass

from controlplane.coordinator import services
from controlplane.core.assembly import Assembly
from controlplane.core.layout import DType, Layout, TensorSpec
from controlplane.rpc import codec, plan_codec
from controlplane.rpc.validation import validate
from engine_agent.services import update_frames
from tests.support.every_rpc import Rpc, every_rpc
from weightplane.v1 import (
    engine_pb2,
    fleet_pb2,
    layout_pb2,
    lifecycle_pb2,
    operator_pb2,
    rollout_pb2,
    version_pb2,
    weight_update_pb2,
)

SERVICES = tuple(f"weightplane.v1.{name}" for name in ("WeightUpdate", "Rollout", "Lifecycle", "Fleet", "Operator"))
LAYOUT = Layout((TensorSpec("a", DType.F32, (4,)), TensorSpec("b", DType.BF16, (2, 3))))
"""Of the updates whose chunks are counted."""


def rpcs(service: str) -> list[Rpc]:
    return list(every_rpc({service}))


def read(rpc: Rpc, data: bytes) -> None:
    """As the service's boundary and its handler would. Raises DecodeError, WeightplaneError."""
    message: Any = GetMessageClass(rpc.descriptor.input_type).FromString(data)
    validate(message)
    reader = _READERS.get(type(message))
    if reader is not None:
        reader(message)


def _update_frame(request: weight_update_pb2.UpdateWeightsRequest) -> None:
    match request.WhichOneof("frame"):
        case "open":
            update_frames.opened(1, request.open)
            if request.open.transport == weight_update_pb2.TRANSPORT_BROADCAST:
                update_frames.link_place(request.open)
        case "layout_part":
            codec.layout_from_parts([request.layout_part])
        case "chunk":
            event = update_frames.chunk_event(1, request.chunk, update_frames.buffers(request.chunk, None))
            delta = any(record.changed_elements is not None for record in event.records)
            assembly = Assembly(LAYOUT, (bytes(8), bytes(8)) if delta else None)
            assembly.add(event.index, event.records, event.buffer_bytes, last=event.last)


def _session_frame(frame: fleet_pb2.SessionRequest) -> None:
    kind = frame.WhichOneof("frame") or ""
    (services._hello_event if kind.endswith("hello") else services._status_event)(1, frame)


def _generate(request: rollout_pb2.GenerateRequest) -> None:
    codec.sampling_from_proto(request.sampling, request.priority)
    codec.pin_from_proto(request.pin)


def _score(request: rollout_pb2.ScoreRequest) -> None:
    codec.pin_from_proto(request.pin)


def _begin(request: fleet_pb2.BeginUpdateRequest) -> None:
    for avoided in request.avoid:
        plan_codec.avoided_from_proto(avoided)
    if request.HasField("base"):
        plan_codec.base_from_proto(request.base)


def _plan(request: operator_pb2.PlanRequest) -> None:
    plan_codec.transport_from_proto(request.transport)


_READERS: Mapping[type, Callable[[Any], object]] = {
    weight_update_pb2.UpdateWeightsRequest: _update_frame,
    fleet_pb2.SessionRequest: _session_frame,
    fleet_pb2.BeginUpdateRequest: _begin,
    rollout_pb2.GenerateRequest: _generate,
    rollout_pb2.ScoreRequest: _score,
    lifecycle_pb2.PauseGenerationRequest: codec.pause_from_proto,
    operator_pb2.PlanRequest: _plan,
}
"""Of the others nothing is left to read once the rules were met."""


def _honest_update(ref: version_pb2.EngineRef) -> list[weight_update_pb2.UpdateWeightsRequest]:
    """The frames of one update, and a chunk of a delta."""
    version, digest = version_pb2.WeightVersion(term=1, number=1), bytes(32)
    place: dict[str, Any] = {"tensor": 0, "tensor_offset": 0, "buffer_offset": 0, "byte_count": 16}
    changed: list[dict[str, Any]] = [{}, {"changed_elements": 2}]
    records = [weight_update_pb2.TensorRecord(**place, checksum=bytes(8), **more) for more in changed]
    buffers = [layout_pb2.BufferHandle(inline=bytes(16))]
    chunks = [weight_update_pb2.Chunk(version=version, index=0, records=[r], buffers=buffers) for r in records]
    opened = weight_update_pb2.UpdateOpen(
        run_id="r",
        model="policy",
        engine=ref,
        update_id="u",
        writer_term=1,
        version=version,
        manifest=weight_update_pb2.Manifest(layout_digest=digest, tensor_count=2, byte_count=28),
        transport=weight_update_pb2.TRANSPORT_INLINE,
    )
    commit = weight_update_pb2.Commit(version=version, chunk_count=1, byte_count=28, content_digest=digest)
    frame = weight_update_pb2.UpdateWeightsRequest
    frames = [frame(open=opened), frame(commit=commit), *(frame(chunk=chunk) for chunk in chunks)]
    return frames + [frame(layout_part=_with_version(part, version)) for part in codec.layout_to_parts(LAYOUT)]


def honest() -> list[tuple[str, Any]]:
    """Messages that are read to their end, by service: what guided fuzzing sets out from."""
    ref = version_pb2.EngineRef(engine_id="e0", incarnation="i")
    status = engine_pb2.EngineStatus(
        engine=ref,
        run_id="r",
        model="policy",
        life=engine_pb2.ENGINE_LIFE_RUNNING,
        weights=engine_pb2.WEIGHTS_STATE_UNSET,
        residency=engine_pb2.RESIDENCY_AWAKE,
    )
    hello = fleet_pb2.EngineHello(status=status, endpoint="127.0.0.1:1", host_id="h", device_uuids=["CPU-0"])
    said = fleet_pb2.SessionRequest
    generate = rollout_pb2.GenerateRequest(run_id="r", model="policy", prompt_token_ids=[1])
    generate.sampling.max_tokens = 4
    return [
        *(("weightplane.v1.WeightUpdate", message) for message in _honest_update(ref)),
        ("weightplane.v1.Fleet", said(engine_hello=hello)),
        ("weightplane.v1.Fleet", said(engine_status=status)),
        ("weightplane.v1.Rollout", generate),
        ("weightplane.v1.Lifecycle", lifecycle_pb2.PauseGenerationRequest(run_id="r", engine=ref, owner="ann")),
        ("weightplane.v1.Operator", operator_pb2.PlanRequest()),
    ]


def _with_version(part: weight_update_pb2.LayoutPart, version: version_pb2.WeightVersion) -> Any:
    part.version.CopyFrom(version)
    return part

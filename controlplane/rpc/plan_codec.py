"""Plans, and what hellos say that plans are made from, between messages and the core's types. No gRPC.

Here, at the border, a device gets its one name (G9): whatever a driver, torch or a person calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controlplane.core.engine_state import Held
from controlplane.core.engine_streaming import STREAMING
from controlplane.core.errors import FrameInvalid
from controlplane.core.fleet_events import Avoided
from controlplane.core.names import device_uuid
from controlplane.core.plan import (
    HOST_MEMORY,
    Apply,
    Assignment,
    EnginePlace,
    LinkFate,
    Load,
    Plan,
    RankPlace,
    Transport,
)
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank
from controlplane.rpc.codec import engine_ref, version_from_proto, version_to_proto
from weightplane.v1 import fleet_pb2, weight_update_pb2

TRANSPORTS = {t: weight_update_pb2.Transport.Value(f"TRANSPORT_{t.name}") for t in Transport}
_TRANSPORTS_BACK = {v: k for k, v in TRANSPORTS.items()}
FATES = {f: weight_update_pb2.LinkFate.Value(f"LINK_FATE_{f.name}") for f in LinkFate}
APPLIES = {a: weight_update_pb2.Apply.Value(f"APPLY_{a.name}") for a in Apply}
FATES_BACK = {v: k for k, v in FATES.items()}


def plan_to_proto(plan: Plan) -> fleet_pb2.Plan:
    assignments = [_assignment_to_proto(a) for a in plan.assignments]
    return fleet_pb2.Plan(revision=plan.revision, digest=plan.digest, assignments=assignments)


def base_to_proto(base: Held) -> weight_update_pb2.Base:
    return weight_update_pb2.Base(version=version_to_proto(base.version), content_digest=base.content_digest)


def base_from_proto(message: weight_update_pb2.Base) -> Held:
    return Held(version_from_proto(message.version), message.content_digest)


def transport_from_proto(value: weight_update_pb2.Transport.ValueType) -> Transport | None:
    """None: not set."""
    return _TRANSPORTS_BACK.get(value)


def avoided_from_proto(message: fleet_pb2.AvoidedTransport) -> Avoided:
    engine = message.engine
    transport = _TRANSPORTS_BACK[message.transport]
    return Avoided(EngineId(engine.engine_id), Incarnation(engine.incarnation), transport, message.cause)


def engine_place_from_proto(hello: fleet_pb2.EngineHello) -> EnginePlace:
    """Raises FrameInvalid when two workers claim one device."""
    return EnginePlace(
        EngineId(hello.status.engine.engine_id),
        Incarnation(hello.status.engine.incarnation),
        hello.endpoint,
        hello.host_id,
        _devices(hello.device_uuids),
        hello.group,
        hello.unit,
        hello.unit_size,
        hello.incarnation_number,
        _transports(hello.transports),
        hello.likeness,
        hello.max_requests,
        STREAMING in hello.capabilities,
        tuple(hello.software),
    )


def rank_places_from_proto(hello: fleet_pb2.TrainerHello) -> tuple[RankPlace, ...]:
    """By rank."""
    places = (RankPlace(Rank(r.rank), r.host_id, device_uuid(r.device_uuid)) for r in hello.ranks)
    return tuple(sorted(places, key=lambda r: r.rank))


def sends_from_proto(hello: fleet_pb2.TrainerHello) -> frozenset[Transport]:
    return _transports(hello.transports)


def load_from_proto(hello: fleet_pb2.TrainerHello) -> Load | None:
    """None: the trainer does not say."""
    if not hello.HasField("load"):
        return None
    load = hello.load
    return Load(load.tensor_count, load.byte_count, load.chunk_bytes, load.largest_module_bytes, load.format)


def load_to_proto(load: Load) -> fleet_pb2.Load:
    return fleet_pb2.Load(
        tensor_count=load.tensor_count,
        byte_count=load.byte_count,
        chunk_bytes=load.chunk_bytes,
        largest_module_bytes=load.largest_module_bytes,
        format=load.weights_format,
    )


def _assignment_to_proto(a: Assignment) -> fleet_pb2.Assignment:
    return fleet_pb2.Assignment(
        engine=engine_ref(a.engine.engine_id, a.engine.incarnation),
        endpoint=a.engine.endpoint,
        ranks=a.ranks,
        leader=a.leader or 0,
        transport=TRANSPORTS[a.transport],
        required=a.required,
        reason=a.reason,
        device_uuids=a.device_uuids,
        link=a.link,
        fate=weight_update_pb2.LINK_FATE_UNSPECIFIED if a.fate is None else FATES[a.fate],
        base=None if a.base is None else base_to_proto(a.base),
        apply=APPLIES[a.apply],
    )


def _devices(texts: Sequence[str]) -> tuple[DeviceUuid, ...]:
    found = tuple(device_uuid(text) for text in texts)
    twice = sorted({d for d in found if found.count(d) > 1})
    if twice:
        raise FrameInvalid("EngineHello", "device_uuids", f"{', '.join(twice)} stands more than once")
    return found


def _transports(values: Iterable[weight_update_pb2.Transport.ValueType]) -> frozenset[Transport]:
    return frozenset(_TRANSPORTS_BACK[v] for v in values if v in _TRANSPORTS_BACK) or HOST_MEMORY

"""Receivers: how an update's bytes reach this host, one file a transport, behind one port (`receivers.port`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.util import find_spec

from controlplane.core.errors import UnsupportedByEngine
from controlplane.core.layout import Layout
from controlplane.device_memory.ranges import ExportedProbe
from controlplane.rpc.metrics import transport_label
from engine_agent.engine import StagedWeights
from engine_agent.kept_maps import KeptMaps
from engine_agent.receivers.broadcast import BroadcastReceiver
from engine_agent.receivers.checkpoint import CheckpointReceiver
from engine_agent.receivers.cuda_ipc import CudaIpcReceiver
from engine_agent.receivers.inline import InlineReceiver
from engine_agent.receivers.links import ReceiverLink
from engine_agent.receivers.port import Buffer, PartReceiver, Receiver
from engine_agent.receivers.shared_memory import SharedMemoryReceiver
from engine_agent.receivers.spare import Spare
from engine_agent.receivers.staging import Staging
from weightplane.v1 import weight_update_pb2

__all__ = [
    "DEFAULT_TRANSPORTS",
    "PART_TRANSPORTS",
    "TRANSPORTS",
    "WHOLE_TRANSPORTS",
    "Buffer",
    "CheckpointReceiver",
    "Incoming",
    "PartReceiver",
    "Receiver",
    "Spare",
    "make_part_receiver",
    "make_receiver",
    "require_received",
    "transports_of",
]

NO_ROOM_NEEDED = frozenset({weight_update_pb2.TRANSPORT_SHARED_MEMORY})
"""Those whose bytes stay where the sender put them."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """What is to come, and to whom."""

    transport: weight_update_pb2.Transport.ValueType
    layout: Layout
    engine_id: str
    host_id: str
    device_uuids: tuple[str, ...]
    link: ReceiverLink | None = None
    """With broadcast: joined."""
    base: StagedWeights | None = None
    """Of a delta: what it changes."""
    spare: Spare | None = None
    """Of a whole version that is copied: where its memory comes from, and goes to."""
    segments: KeptMaps | None = None
    """With shared memory: what stayed mapped since the update before."""
    exports: Sequence[ExportedProbe] = ()
    """With device memory: what the workers have open."""


def _shared_memory(incoming: Incoming) -> SharedMemoryReceiver:
    return SharedMemoryReceiver(incoming.layout, incoming.host_id, incoming.device_uuids, incoming.segments)


def _inline(incoming: Incoming) -> InlineReceiver:
    return InlineReceiver(_staging(incoming))


def _inline_parts(incoming: Incoming) -> InlineReceiver:
    return InlineReceiver(Staging(incoming.layout, reserve=False), keeps=False)


def _broadcast(incoming: Incoming) -> BroadcastReceiver:
    if incoming.link is None:
        raise _unsupported(incoming.engine_id, incoming.transport)
    return BroadcastReceiver(_staging(incoming), incoming.link)


def _cuda_ipc(incoming: Incoming) -> CudaIpcReceiver:
    return CudaIpcReceiver(incoming.layout, incoming.device_uuids, incoming.exports)


RECEIVERS: Mapping[weight_update_pb2.Transport.ValueType, Callable[[Incoming], Receiver]] = {
    weight_update_pb2.TRANSPORT_SHARED_MEMORY: _shared_memory,
    weight_update_pb2.TRANSPORT_INLINE: _inline,
    weight_update_pb2.TRANSPORT_BROADCAST: _broadcast,
}
"""By which a writer sends bytes; checkpoints are read, and are another setting's matter."""
PART_RECEIVERS: Mapping[weight_update_pb2.Transport.ValueType, Callable[[Incoming], PartReceiver]] = {
    weight_update_pb2.TRANSPORT_SHARED_MEMORY: _shared_memory,
    weight_update_pb2.TRANSPORT_INLINE: _inline_parts,
    weight_update_pb2.TRANSPORT_CUDA_IPC: _cuda_ipc,
}
"""Of streaming updates: what was installed they forget."""
WHOLE_TRANSPORTS = frozenset(RECEIVERS)
PART_TRANSPORTS = frozenset(PART_RECEIVERS)
TRANSPORTS = tuple(map(transport_label, [*RECEIVERS, *(t for t in PART_RECEIVERS if t not in RECEIVERS)]))
"""What settings may name."""
DEFAULT_TRANSPORTS = tuple(name for name in TRANSPORTS if name not in ("broadcast", "cuda_ipc") or find_spec("torch"))
"""Unless settings say otherwise. Links and device memory are torch's: without it, as beside an in-memory engine, there
are none. Of device memory the engine says whether its workers have any that they can open."""


def make_receiver(incoming: Incoming) -> Receiver:
    """The receiver of a transport, empty.

    Raises:
        UnsupportedByEngine: there is none for it. LimitExceeded: memory does not suffice.
    """
    require_received(incoming.engine_id, incoming.transport, RECEIVERS.keys())
    return RECEIVERS[incoming.transport](incoming)


def make_part_receiver(incoming: Incoming) -> PartReceiver:
    """The receiver of a streaming update, empty.

    Raises:
        UnsupportedByEngine: there is none for this transport.
    """
    require_received(incoming.engine_id, incoming.transport, PART_TRANSPORTS)
    return PART_RECEIVERS[incoming.transport](incoming)


def _staging(incoming: Incoming) -> Staging:
    if incoming.base is None:
        return Staging(incoming.layout, spare=incoming.spare)
    from engine_agent.receivers.delta import PatchedStaging  # needs numpy, which only the engines' extras bring

    return PatchedStaging(incoming.layout, incoming.base)


def transports_of(names: tuple[str, ...]) -> frozenset[weight_update_pb2.Transport.ValueType]:
    """The schema's values of settings' names."""
    return frozenset(weight_update_pb2.Transport.Value(f"TRANSPORT_{name.upper()}") for name in names)


def require_received(
    engine_id: str,
    transport: weight_update_pb2.Transport.ValueType,
    received: Set[weight_update_pb2.Transport.ValueType],
) -> None:
    """Raises UnsupportedByEngine: the engine does not receive by this transport."""
    if transport not in received:
        raise _unsupported(engine_id, transport)


def _unsupported(engine_id: str, transport: weight_update_pb2.Transport.ValueType) -> UnsupportedByEngine:
    known = transport in weight_update_pb2.Transport.values()
    name = weight_update_pb2.Transport.Name(transport) if known else str(transport)
    return UnsupportedByEngine(engine_id=engine_id, what=f"receive by {name.removeprefix('TRANSPORT_').lower()}")

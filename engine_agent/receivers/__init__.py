"""Receivers: how an update's bytes reach this host, one file a transport, behind one port (`receivers.port`)."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from importlib.util import find_spec

from controlplane.core.errors import UnsupportedByEngine
from controlplane.core.layout import Layout
from engine_agent.engine import StagedWeights
from engine_agent.kept_maps import KeptMaps
from engine_agent.receivers.broadcast import BroadcastReceiver
from engine_agent.receivers.checkpoint import CheckpointReceiver
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

TRANSPORTS = ("shared_memory", "inline", "broadcast")
"""What settings may name; checkpoints are another setting's matter."""
DEFAULT_TRANSPORTS = ("shared_memory", "inline", *(["broadcast"] if find_spec("torch") else []))
"""Unless settings say otherwise. Links are torch's: without it, as beside an in-memory engine, there are none."""

NO_ROOM_NEEDED = frozenset({weight_update_pb2.TRANSPORT_SHARED_MEMORY})
"""Those whose bytes stay where the sender put them."""
PART_TRANSPORTS = frozenset({weight_update_pb2.TRANSPORT_INLINE, weight_update_pb2.TRANSPORT_SHARED_MEMORY})
"""Those of streaming updates."""


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


def make_receiver(incoming: Incoming) -> Receiver:
    """The receiver of a transport whose bytes a writer sends, empty.

    Raises:
        UnsupportedByEngine: there is none for it. LimitExceeded: memory does not suffice.
    """
    match incoming.transport:
        case weight_update_pb2.TRANSPORT_INLINE:
            return InlineReceiver(_staging(incoming))
        case weight_update_pb2.TRANSPORT_SHARED_MEMORY:
            return SharedMemoryReceiver(incoming.layout, incoming.host_id, incoming.device_uuids, incoming.segments)
        case weight_update_pb2.TRANSPORT_BROADCAST if incoming.link is not None:
            return BroadcastReceiver(_staging(incoming), incoming.link)
        case unknown:
            raise _unsupported(incoming.engine_id, unknown)


def make_part_receiver(incoming: Incoming) -> PartReceiver:
    """The receiver of a streaming update, empty: what was installed it forgets.

    Raises:
        UnsupportedByEngine: there is none for this transport.
    """
    match incoming.transport:
        case weight_update_pb2.TRANSPORT_INLINE:
            return InlineReceiver(Staging(incoming.layout, reserve=False), keeps=False)
        case weight_update_pb2.TRANSPORT_SHARED_MEMORY:
            return SharedMemoryReceiver(incoming.layout, incoming.host_id, incoming.device_uuids, incoming.segments)
        case unknown:
            raise _unsupported(incoming.engine_id, unknown)


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

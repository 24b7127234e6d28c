"""Receivers: how an update's bytes reach this host, one file a transport, behind one port (`receivers.port`)."""

from __future__ import annotations

from controlplane.core.layout import Layout
from engine_agent.receivers.checkpoint import CheckpointReceiver
from engine_agent.receivers.inline import InlineReceiver
from engine_agent.receivers.port import Buffer, Receiver
from engine_agent.receivers.shared_memory import SharedMemoryReceiver
from weightplane.v1 import weight_update_pb2

__all__ = ["Buffer", "CheckpointReceiver", "Receiver", "make_receiver"]


def make_receiver(
    transport: weight_update_pb2.Transport.ValueType, layout: Layout, host_id: str, device_uuids: tuple[str, ...]
) -> Receiver:
    """The receiver of a transport whose bytes a writer sends, empty."""
    if transport == weight_update_pb2.TRANSPORT_INLINE:
        return InlineReceiver(layout)
    return SharedMemoryReceiver(layout, host_id, device_uuids)

"""Senders: how a rank's chunks go to the engines of one part, one file a transport, behind one port (`port`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from controlplane.core.errors import SlotMismatch
from trainer_agent.rank.senders.broadcast import BroadcastSender
from trainer_agent.rank.senders.cuda_ipc import CudaIpcSender
from trainer_agent.rank.senders.inline import InlineSender
from trainer_agent.rank.senders.port import Means, Sender
from trainer_agent.rank.senders.shared_memory import SharedMemorySender
from trainer_agent.transports import BROADCAST, CUDA_IPC, INLINE, SHARED_MEMORY
from weightplane.v1 import weight_update_pb2

SENDERS: Mapping[weight_update_pb2.Transport.ValueType, Callable[[Means], Sender]] = {
    SHARED_MEMORY: SharedMemorySender,
    INLINE: InlineSender,
    BROADCAST: BroadcastSender,
    CUDA_IPC: CudaIpcSender,
}


def make_sender(means: Means) -> Sender:
    """Raises SlotMismatch: the plan has a transport that this rank does not know."""
    transport = means.part.transport
    if transport not in SENDERS:
        what = f"rank {means.rank} cannot send {weight_update_pb2.Transport.Name(transport)}"
        raise SlotMismatch(engine_id=means.part.engine_ids[0], what="the plan", ranks=what)
    return SENDERS[transport](means)

"""The transports that this side sends by, and what rank and agent both must know of each. One line a transport. Pure.

How chunks go by one is said by its sender (`rank.senders`), and how an engine's stream carries them by its way
(`agent.ways`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightplane.v1 import weight_update_pb2

SHARED_MEMORY = weight_update_pb2.TRANSPORT_SHARED_MEMORY
INLINE = weight_update_pb2.TRANSPORT_INLINE
BROADCAST = weight_update_pb2.TRANSPORT_BROADCAST
CUDA_IPC = weight_update_pb2.TRANSPORT_CUDA_IPC


@dataclass(frozen=True, slots=True)
class Traits:
    """Of one transport. Where nothing is said, the leader alone sends, and keeps two chunks."""

    by_reference: bool = False
    """Engines read each rank's own memory until the update is over: all ranks of a slot export everything."""
    by_agent: bool = False
    """The agent reads the leader's memory, and says how far it is."""
    by_link: bool = False
    """Bytes go beside the streams, over a connection of the leader's own; it needs an address that engines reach."""
    by_device: bool = False
    """Workers read each rank's device memory, and engines say when they have: all ranks of a slot export everything,
    and keep two chunks there."""

    @property
    def by_slot(self) -> bool:
        """Every rank of a slot gives handles: they meet for it."""
        return self.by_reference or self.by_device


TRAITS: Mapping[weight_update_pb2.Transport.ValueType, Traits] = {
    SHARED_MEMORY: Traits(by_reference=True),
    INLINE: Traits(by_agent=True),
    BROADCAST: Traits(by_link=True),
    CUDA_IPC: Traits(by_device=True),
}


def traits_of(transport: weight_update_pb2.Transport.ValueType) -> Traits:
    """Of one that is not known: none. Plans with such are refused (`agent.ways`)."""
    return TRAITS.get(transport, Traits())


def sends(link_host: str, *, device_memory: bool = False) -> list[weight_update_pb2.Transport.ValueType]:
    """How ranks can send.

    `link_host`: where engines of other hosts reach them; empty: nowhere. `device_memory`: each can export some.
    """
    unable = {t for t, traits in TRAITS.items() if traits.by_link and not link_host}
    unable |= {t for t, traits in TRAITS.items() if traits.by_device and not device_memory}
    return [transport for transport in TRAITS if transport not in unable]

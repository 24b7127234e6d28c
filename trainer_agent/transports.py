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


@dataclass(frozen=True, slots=True)
class Traits:
    """Of one transport. Where nothing is said, the leader alone sends, and keeps two chunks."""

    by_reference: bool = False
    """Engines read each rank's own memory until the update is over: all ranks of a slot export everything."""
    by_agent: bool = False
    """The agent reads the leader's memory, and says how far it is."""
    by_link: bool = False
    """Bytes go beside the streams, over a connection of the leader's own; it needs an address that engines reach."""


TRAITS: Mapping[weight_update_pb2.Transport.ValueType, Traits] = {
    SHARED_MEMORY: Traits(by_reference=True),
    INLINE: Traits(by_agent=True),
    BROADCAST: Traits(by_link=True),
}


def traits_of(transport: weight_update_pb2.Transport.ValueType) -> Traits:
    """Of one that is not known: none. Plans with such are refused (`agent.ways`)."""
    return TRAITS.get(transport, Traits())


def sends(link_host: str) -> list[weight_update_pb2.Transport.ValueType]:
    """How ranks can send. `link_host`: where engines of other hosts reach them; empty: nowhere."""
    return [transport for transport, traits in TRAITS.items() if link_host or not traits.by_link]

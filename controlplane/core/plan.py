"""Which ranks feed which engine, by which transport: what a plan is. `planner` makes them.

A plan is fixed for the life of an update. Its digest covers all of it that anybody acts on: ranks compare it before
their first collective (G5).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

from controlplane.core.engine_state import Held
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank


class Transport(Enum):
    SHARED_MEMORY = "shared_memory"
    """A segment of the sender's host, which the engine's workers map."""
    INLINE = "inline"
    """The bytes themselves, in the stream. Every engine takes it."""
    CHECKPOINT = "checkpoint"
    """A directory that the engine reads itself; the coordinator names it, and no rank takes part."""
    BROADCAST = "broadcast"
    """One sender to all engines of a link."""
    CUDA_IPC = "cuda_ipc"
    """Device memory, from each rank to the worker on its device: two chunks of it, installed as they come."""


HOST_MEMORY = frozenset({Transport.SHARED_MEMORY, Transport.INLINE})
"""What an agent can do that does not say."""
BY_REFERENCE = (Transport.SHARED_MEMORY, Transport.CUDA_IPC)
"""Every rank of a slot writes its bytes once, for all who read them; by the other transports only the leader sends."""
IN_PIECES = (Transport.INLINE, Transport.BROADCAST)
"""The leader sends each chunk and forgets it; an engine's agent has the bytes in memory of its own."""
CAN_BE_DELTAS = IN_PIECES
"""By reference nothing is sent that a delta could save."""
PART_TRANSPORTS = (Transport.SHARED_MEMORY, Transport.INLINE, Transport.CUDA_IPC)
"""By which bytes can be streamed. Over a link all engines go at one pace: one that waits for go would hold up those
that say ready when all bytes are in."""


class LinkFate(Enum):
    """Whose failure ends whose bytes on links; see weight_update.proto."""

    SHARED = "shared"
    """One link for all engines that a rank feeds by broadcast: the bytes leave it once."""
    PER_ENGINE = "per_engine"
    """A link for each engine: none suffers from another, and the bytes leave once for each."""


class Apply(Enum):
    """When an engine installs an update's bytes; see weight_update.proto."""

    STAGED = "staged"
    """Once all are here: the engine generates meanwhile, and a second copy of the weights waits for the install."""
    STREAMING = "streaming"
    """As they come: no second copy, and no generation from the first chunk on."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A training process and its device."""

    rank: Rank
    host_id: str
    device_uuid: DeviceUuid


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """An engine and its devices, in worker rank order."""

    engine_id: EngineId
    incarnation: Incarnation
    endpoint: str
    host_id: str
    device_uuids: tuple[DeviceUuid, ...]
    group: str = ""
    """What a policy's `min_engines` counts it under."""
    unit: str = ""
    """Engines that serve together or not at all, such as prefill and decode: behind one gate."""
    unit_size: int = 0
    """How many engines the unit has."""
    incarnation_number: int = 0
    """By the agent's disk; 0: unknown. Incarnations have no order, their numbers have."""
    transports: frozenset[Transport] = HOST_MEMORY
    """How bytes can reach it."""
    likeness: str = ""
    """Engines of one likeness say the same of the same bytes. Empty: it is like no other."""
    max_requests: int = 0
    """How many requests it runs at once; 0: unknown."""
    streaming: bool = False
    """It installs updates as they come, where their transport allows it."""
    software: tuple[str, ...] = ()
    """What it runs on, for people."""


@dataclass(frozen=True, slots=True)
class Load:
    """The size of what a trainer sends; see fleet.proto."""

    tensor_count: int
    byte_count: int
    chunk_bytes: int
    largest_module_bytes: int
    weights_format: str = ""
    """Empty: the trainer does not say."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One engine and the ranks that feed it; see fleet.proto."""

    engine: EnginePlace
    ranks: tuple[Rank, ...]
    device_uuids: tuple[DeviceUuid, ...]
    """Device of each rank; ("",) where the sender's device is not the engine's."""
    transport: Transport
    required: bool
    reason: str
    link: str = ""
    """With BROADCAST: which one."""
    fate: LinkFate | None = None
    """With BROADCAST: the link's."""
    base: Held | None = None
    """What the engine holds and the trainer still has: the leader may send what changed since (INV-5)."""
    apply: Apply = Apply.STAGED

    @property
    def leader(self) -> Rank | None:
        """None: the coordinator writes."""
        return self.ranks[0] if self.ranks else None


@dataclass(frozen=True, slots=True)
class Plan:
    revision: int
    assignments: tuple[Assignment, ...]

    @property
    def digest(self) -> bytes:
        """sha256 over the whole, less the reasons; 32 bytes. Ranks compare it before their first collective."""
        h = hashlib.sha256(b"weightplane-plan-v2\0")
        h.update(f"{self.revision}\n".encode())
        for a in self.assignments:
            h.update(repr(_acted_on(a)).encode() + b"\n")
        return h.digest()


def _acted_on(a: Assignment) -> tuple[object, ...]:
    """Plain values, so that their repr has one form."""
    base = None if a.base is None else (a.base.version.term, a.base.version.number, a.base.content_digest)
    return (
        *(a.engine.engine_id, a.engine.incarnation, a.engine.endpoint),
        *(a.ranks, a.device_uuids, a.transport.value, a.required),
        *(a.link, None if a.fate is None else a.fate.value, base),
        *([a.apply.value] if a.apply is Apply.STREAMING else []),
    )

"""Which ranks feed which engine, by which transport.

Slots come from device UUIDs: the ranks whose devices are one engine's devices, the lowest of them leading. All of
an engine's devices held by ranks: colocated. None: some rank is chosen to send. Some but not all: the engine is
a misfit and is refused at its hello, so no plan ever meets one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from controlplane.core.errors import EngineMisfit
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank


class Transport(Enum):
    SHARED_MEMORY = "shared_memory"
    INLINE = "inline"
    BROADCAST = "broadcast"
    CUDA_IPC = "cuda_ipc"
    CHECKPOINT = "checkpoint"
    """A directory that the engine reads itself; the coordinator names it, and no rank takes part."""


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
    life: int = 0
    """Number of this life, by the agent's disk; 0: unknown. Incarnations have no order, lives have."""


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
        """sha256 over the whole; 32 bytes. Ranks compare it before their first collective."""
        h = hashlib.sha256(b"weightplane-plan-v1\0")
        for a in self.assignments:
            ranks = ",".join(map(str, a.ranks))
            h.update(f"{a.engine.engine_id}\0{a.engine.incarnation}\0{ranks}\0{a.transport.value}\n".encode())
        return h.digest()


def check_fit(engine: EnginePlace, ranks: Iterable[RankPlace]) -> None:
    """Raises EngineMisfit when ranks hold some of the engine's devices, but not all."""
    held = {r.device_uuid for r in ranks}
    missing = [d for d in engine.device_uuids if d not in held]
    if missing and len(missing) < len(engine.device_uuids):
        raise EngineMisfit(
            engine_id=engine.engine_id,
            held=len(engine.device_uuids) - len(missing),
            total=len(engine.device_uuids),
            missing=[str(d) for d in missing],
        )


def make_plan(
    revision: int,
    engines: Sequence[EnginePlace],
    required: frozenset[EngineId],
    ranks: Sequence[RankPlace],
    forced: Transport | None = None,
) -> Plan:
    """One assignment for each engine, in the order of engine ids. `forced` overrides the choice of transport."""
    load: Counter[Rank] = Counter()
    assignments = []
    for engine in sorted(engines, key=lambda p: p.engine_id):
        check_fit(engine, ranks)
        slot = sorted((r for r in ranks if r.device_uuid in engine.device_uuids), key=lambda r: r.rank)
        senders = slot or [_chosen(engine, ranks, load)]
        load[senders[0].rank] += 1
        transport, reason = _transport(engine, senders, colocated=bool(slot), forced=forced)
        assignments.append(
            Assignment(
                engine=engine,
                ranks=tuple(r.rank for r in senders),
                device_uuids=tuple(r.device_uuid for r in senders) if slot else (DeviceUuid(""),),
                transport=transport,
                required=engine.engine_id in required,
                reason=reason,
            )
        )
    return Plan(revision, tuple(assignments))


def checkpoint_plan(revision: int, engines: Sequence[EnginePlace], required: frozenset[EngineId]) -> Plan:
    """Every engine reads the same directory."""
    return Plan(
        revision,
        tuple(
            Assignment(
                engine=engine,
                ranks=(),
                device_uuids=(),
                transport=Transport.CHECKPOINT,
                required=engine.engine_id in required,
                reason="a checkpoint is brought back",
            )
            for engine in sorted(engines, key=lambda p: p.engine_id)
        ),
    )


def _chosen(engine: EnginePlace, ranks: Sequence[RankPlace], load: Counter[Rank]) -> RankPlace:
    """For an engine on devices of its own: a rank of its host before others, then the least loaded, then the lowest."""
    return min(ranks, key=lambda r: (r.host_id != engine.host_id, load[r.rank], r.rank))


def _transport(
    engine: EnginePlace, senders: Sequence[RankPlace], *, colocated: bool, forced: Transport | None
) -> tuple[Transport, str]:
    same_host = all(r.host_id == engine.host_id for r in senders)
    where = "devices shared with the slot's ranks" if colocated else "devices of its own"
    if forced is not None:
        return forced, f"{where}; {forced.value} was asked for"
    if same_host:
        return Transport.SHARED_MEMORY, f"{where}; same host"
    return Transport.INLINE, f"{where}; another host"

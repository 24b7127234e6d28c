"""What a plan costs each side: bytes that leave each rank, memory beside the model at ranks and at engines.

Of whole versions, from what the trainer stated (`Load`); where it stated nothing every size is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from controlplane.core.plan import BY_REFERENCE, IN_PIECES, Apply, Assignment, Load, Plan, Transport
from controlplane.core.versions import EngineId, Rank


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sends by one transport. `engine_ids` are in the order of the plan."""

    transport: Transport
    engine_ids: tuple[EngineId, ...]
    byte_count: int | None


@dataclass(frozen=True, slots=True)
class SenderCost:
    """A rank that sends; see operator.proto."""

    rank: Rank
    sent: tuple[Sent, ...]
    memory_bytes: int | None
    device_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class EngineCost:
    """An engine of the plan; see operator.proto."""

    engine_id: EngineId
    staging_bytes: int | None
    loading_bytes: int | None


def sender_costs(plan: Plan, load: Load | None) -> tuple[SenderCost, ...]:
    """By rank."""
    parts: dict[Rank, dict[Transport, list[Assignment]]] = {}
    for a in plan.assignments:
        for rank in a.ranks if a.transport in BY_REFERENCE else a.ranks[:1]:
            parts.setdefault(rank, {}).setdefault(a.transport, []).append(a)
    return tuple(_sender(rank, part, load) for rank, part in sorted(parts.items()))


def engine_costs(plan: Plan, load: Load | None) -> tuple[EngineCost, ...]:
    """In the order of the plan."""
    return tuple(_engine(a, load) for a in plan.assignments)


def _sender(rank: Rank, part: Mapping[Transport, Sequence[Assignment]], load: Load | None) -> SenderCost:
    sent = tuple(
        Sent(t, tuple(a.engine.engine_id for a in part[t]), None if load is None else _leaving(part[t], load))
        for t in Transport
        if t in part
    )
    if load is None:
        return SenderCost(rank, sent, None, None)
    device = _two_chunks(load) if Transport.CUDA_IPC in part else 0
    return SenderCost(rank, sent, _host_memory(part, load), device)


def _leaving(assignments: Iterable[Assignment], load: Load) -> int:
    """By reference once for all; over a link once for its engines; inline once for each."""
    copies = {_copy_of(a) for a in assignments}
    return len(copies) * load.byte_count


def _copy_of(a: Assignment) -> str:
    return "" if a.transport in BY_REFERENCE else a.link or a.engine.engine_id


def _host_memory(part: Mapping[Transport, object], load: Load) -> int:
    """A segment that others map holds everything; what is sent in pieces is made in pieces, one ahead of the other."""
    if Transport.SHARED_MEMORY in part:
        return load.byte_count
    return _two_chunks(load) if any(t in part for t in (*IN_PIECES, Transport.CUDA_IPC)) else 0


def _two_chunks(load: Load) -> int:
    return 2 * min(load.chunk_bytes, load.byte_count)


def _engine(a: Assignment, load: Load | None) -> EngineCost:
    if load is None:
        return EngineCost(a.engine.engine_id, None, None)
    chunks = _two_chunks(load) if a.transport is Transport.CUDA_IPC else 0
    staging = load.byte_count if a.transport in IN_PIECES else 0
    if a.apply is Apply.STREAMING:  # what was installed is forgotten
        staging = min(staging, _two_chunks(load))
    return EngineCost(a.engine.engine_id, staging, load.largest_module_bytes + chunks)

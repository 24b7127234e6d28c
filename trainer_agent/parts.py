"""A rank's parts of a plan: which engines get the same chunks from it, by which way. Pure; rank and agent agree on it.

Promises: the parts come in one order on every rank, since merging handles is a collective; engines of one link are one
part, in the plan's order.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer_agent.transports import Traits, traits_of
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, weight_update_pb2


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank does for engines that it feeds alike."""

    ranks: tuple[int, ...]
    """Who sends, ascending: the slot's ranks, or its leader alone. The first leads, and alone speaks to the agent."""
    transport: weight_update_pb2.Transport.ValueType
    engines: tuple[tuple[str, str], ...]
    """Id and incarnation of each, in the plan's order."""
    device_uuid: str = ""
    """Whose worker reads this rank's buffer; empty where any can: a slot of one rank feeds the whole engine."""
    link: str = ""
    """With broadcast: the plan's name of the link."""
    fate: weight_update_pb2.LinkFate.ValueType = weight_update_pb2.LINK_FATE_UNSPECIFIED
    base: weight_update_pb2.Base | None = None
    """What these engines hold: they may be sent what changed since then."""

    @property
    def leader(self) -> int:
        return self.ranks[0]

    @property
    def engine_ids(self) -> tuple[str, ...]:
        return tuple(engine_id for engine_id, _ in self.engines)

    @property
    def traits(self) -> Traits:
        return traits_of(self.transport)


def parts_of(plan: rank_pb2.PushPlan, rank: int) -> list[Part]:
    """What `rank` has to export for: all parts that it leads, and those by reference of the slots it belongs to."""
    found: dict[tuple[object, ...], list[fleet_pb2.Assignment]] = {}
    for a in plan.assignments:
        ranks = _senders(a)
        if rank in ranks:
            base = a.base.content_digest if a.HasField("base") else b""
            found.setdefault((ranks, int(a.transport), a.link, base), []).append(a)
    return [_part(found[key], rank) for key in sorted(found, key=repr)]


def _senders(a: fleet_pb2.Assignment) -> tuple[int, ...]:
    """The slot's ranks where each gives handles, else its leader alone: whose slot a link's engines are is all one."""
    return tuple(a.ranks if traits_of(a.transport).by_slot else a.ranks[:1])


def keeps_whole(plan: rank_pb2.PushPlan, rank: int) -> bool:
    """Whether the rank keeps every byte of the version until the push is over, or only the last two chunks."""
    return plan.keep_whole or rank in _lenders(plan)


def keep_two(plan: rank_pb2.PushPlan) -> set[int]:
    """The leaders that keep the last two chunks: of all of them at once, for a plan may have a thousand."""
    return set() if plan.keep_whole else {a.leader for a in plan.assignments} - _lenders(plan)


def _lenders(plan: rank_pb2.PushPlan) -> set[int]:
    """Ranks whose own memory engines read until the update is over."""
    return {r for a in plan.assignments if traits_of(a.transport).by_reference for r in _senders(a)}


def _part(assignments: list[fleet_pb2.Assignment], rank: int) -> Part:
    first = assignments[0]
    ranks = _senders(first)
    return Part(
        ranks=ranks,
        transport=first.transport,
        engines=tuple((a.engine.engine_id, a.engine.incarnation) for a in assignments),
        device_uuid=first.device_uuids[ranks.index(rank)] if len(ranks) > 1 else "",
        link=first.link,
        fate=first.fate,
        base=first.base if first.HasField("base") else None,
    )

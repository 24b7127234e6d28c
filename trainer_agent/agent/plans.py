"""The coordinator's plan, checked, and cut into what each rank is told. Pure."""

from __future__ import annotations

from controlplane.core.errors import SlotMismatch
from trainer_agent.agent.ways import require_known
from trainer_agent.transports import traits_of
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2


def check_plan(plan: fleet_pb2.Plan, world_size: int) -> None:
    """The leader is the slot's lowest rank, whatever the trainer's parallelism is; every rank exists.

    Raises:
        SlotMismatch: the plan cannot be followed.
    """
    for a in plan.assignments:
        ranks = list(a.ranks)
        in_order = bool(ranks) and ranks == sorted(set(ranks)) and ranks[0] == a.leader
        if not in_order or ranks[0] < 0 or ranks[-1] >= world_size:
            text = f"{ranks} led by {a.leader}, of {world_size}"
            raise SlotMismatch(engine_id=a.engine.engine_id, what="the plan", ranks=text)
        if len(ranks) > 1 and len(a.device_uuids) != len(ranks):
            raise SlotMismatch(engine_id=a.engine.engine_id, what="the plan's devices", ranks=str(ranks))
        require_known(a)


def push_plan(
    begun: fleet_pb2.BeginUpdateResponse,
    chunk_bytes: int,
    link_host: str = "",
    *,
    keep_whole: bool = False,
    traced: str = "",
) -> rank_pb2.PushPlan:
    """The plan for the ranks, with every assignment: each rank is sent its own part by `for_rank`.

    Ranks of a slot meet where each of them gives handles; by other ways the leader sends alone.
    """
    plan = rank_pb2.PushPlan(
        update_id=begun.update_id,
        version=begun.version,
        plan_digest=begun.plan.digest,
        plan_revision=begun.plan.revision,
        assignments=begun.plan.assignments,
        chunk_bytes=chunk_bytes,
        keep_whole=keep_whole,
        link_host=link_host,
        traced=traced,
    )
    for assignment in begun.plan.assignments:
        if len(assignment.ranks) > 1 and traits_of(assignment.transport).by_slot:
            plan.shared_slots.add(engine_id=assignment.engine.engine_id, ranks=assignment.ranks)
    return plan


def for_rank(plan: rank_pb2.PushPlan, rank: int, sequence: int) -> rank_pb2.PushPlan:
    """The part of one rank."""
    part = rank_pb2.PushPlan()
    part.CopyFrom(plan)
    del part.assignments[:]
    part.assignments.extend(a for a in plan.assignments if rank in a.ranks)
    part.sequence = sequence
    return part

"""What ranks asked of one push, and what stays the same over all of theirs; the messages that are made of both."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.core.errors import StaleTerm, WeightplaneError
from controlplane.core.layout import Layout
from controlplane.rpc.codec import seconds_to_proto
from trainer_agent.agent.avoided import Avoided
from trainer_agent.agent.checkpoints import CheckpointKeeper
from trainer_agent.agent.stream import Cargo
from trainer_agent.agent.stubs import Stubs
from weightplane.v1 import fleet_pb2, pause_pb2, weight_update_pb2

MAX_REASON_LENGTH = 4096


@dataclass(frozen=True)
class PushContext:
    """What stays the same over the pushes of one set of ranks."""

    stubs: Stubs
    run_id: str
    model: str
    layout: Layout
    parts: tuple[weight_update_pb2.LayoutPart, ...]
    chunk_bytes: int
    world_size: int
    fenced: Callable[[StaleTerm], None]
    """Told when something that goes on beside the pushes meets a later term."""
    avoided: Avoided = field(default_factory=Avoided)
    """Ways that did not work."""
    link_host: str = ""
    """Where engines of other hosts reach the ranks of this one; empty: nothing is broadcast."""
    checkpoints: CheckpointKeeper | None = None
    """Keeps committed versions on disk; None: nobody does."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One attempt, as all ranks asked for it."""

    term: int
    step: int
    limit_seconds: float
    """How long the ranks wait."""
    first: bool
    """No attempt of this push failed before."""
    base: weight_update_pb2.Base | None
    """What ranks still have the bytes of: a delta to it may do."""
    keeps_whole: bool
    """Ranks do, for deltas."""
    reference: weight_update_pb2.CanaryReference | None = None
    """What the trainer's model says under these weights."""
    pause: pause_pb2.PausePolicy | None = None
    """What becomes of the engines' requests; None: by each engine's own setting."""


def begin_request(context: PushContext, asked: Asked) -> fleet_pb2.BeginUpdateRequest:
    """A new one: its id is its own."""
    return fleet_pb2.BeginUpdateRequest(
        run_id=context.run_id,
        model=context.model,
        term=asked.term,
        request_id=uuid.uuid4().hex,
        step=asked.step,
        layout_digest=context.layout.digest,
        byte_count=context.layout.byte_count,
        ready_limit=seconds_to_proto(asked.limit_seconds),
        avoid=context.avoided.entries(),
        base=asked.base,
    )


def abort_request(
    context: PushContext, asked: Asked, update_id: str, error: WeightplaneError
) -> fleet_pb2.AbortUpdateRequest:
    return fleet_pb2.AbortUpdateRequest(
        run_id=context.run_id, update_id=update_id, term=asked.term, reason=str(error)[:MAX_REASON_LENGTH]
    )


def cargo(context: PushContext, asked: Asked, begun: fleet_pb2.BeginUpdateResponse) -> Cargo:
    """What every engine's stream opens with."""
    layout = context.layout
    manifest = weight_update_pb2.Manifest(
        layout_digest=layout.digest,
        tensor_count=len(layout.tensors),
        byte_count=layout.byte_count,
        step=asked.step,
        reference=asked.reference,
    )
    head = weight_update_pb2.UpdateOpen(
        run_id=context.run_id,
        model=context.model,
        update_id=begun.update_id,
        writer_term=asked.term,
        version=begun.version,
        plan_revision=begun.plan.revision,
        manifest=manifest,
        pause=asked.pause,
    )
    return Cargo(head, context.parts)

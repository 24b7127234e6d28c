"""One push on one rank: export the weights chunk by chunk, and let each part's sender bring them on their way.

Promises: every rank iterates to the end, whatever its part; the end of the push is noticed between any two chunks and
in every wait; memory is a ring of two chunks unless somebody reads whole versions. Refuses plans with a way that these
ranks do not know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from controlplane import failpoints
from controlplane.core.errors import WeightplaneError
from controlplane.core.layout import Layout
from trainer_agent.chunking import FIRST_BYTES, SegmentPlan, plan_segment
from trainer_agent.parts import Part, keeps_whole, parts_of
from trainer_agent.rank.cuda_ipc import DeviceRings
from trainer_agent.rank.exporter import Exporter
from trainer_agent.rank.gather import GatherGroups
from trainer_agent.rank.inbox import Inbox
from trainer_agent.rank.kept import KeptVersions
from trainer_agent.rank.link import Patience, RankLink
from trainer_agent.rank.links import Links
from trainer_agent.rank.memory import (
    COPIED_BYTES,
    NOTHING,
    ExportMemory,
    RingMemory,
    WholeMemory,
    ring_bytes,
    room_bytes,
)
from trainer_agent.rank.senders import make_sender
from trainer_agent.rank.senders.delta import DeltaSender, Difference, difference_of
from trainer_agent.rank.senders.port import Announcer, Content, Means, Sender
from trainer_agent.rank.times import Times
from trainer_agent.segments import Segment, SegmentPool
from trainer_agent.transports import INLINE, traits_of
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import weight_update_pb2

Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass
class Held:
    """What a rank keeps from push to push."""

    segments: SegmentPool | KeptVersions
    """KeptVersions: engines that hold what it keeps may be sent deltas."""
    groups: GatherGroups
    links: Links = field(default_factory=Links)
    rings: DeviceRings = field(default_factory=DeviceRings)
    exported: weight_update_pb2.Base | None = None
    """What a push wrote into the segment, once that is everything."""

    @property
    def keeps_whole(self) -> bool:
        return isinstance(self.segments, KeptVersions)

    @property
    def base(self) -> weight_update_pb2.Base | None:
        """The version that the fleet committed last, if its bytes are here."""
        kept = self.segments.base if isinstance(self.segments, KeptVersions) else None
        return None if kept is None else kept.name

    def settle(self, *, released: bool, failed: bool) -> None:
        """A push is over. `released`: no engine reads the memory any more (INV-12)."""
        free = released and not self.links.busy
        self.rings.settle(free=released)
        exported, self.exported = self.exported, None
        if isinstance(self.segments, KeptVersions):
            self.segments.settle(free, None if failed else exported)
        else:
            self.segments.settle(free)
        if failed:
            # An exchange or a broadcast may have been left half done on some member: the next push meets anew.
            self.groups.close()
            self.links.close()

    def close(self) -> None:
        """Let go of everything."""
        self.groups.close()
        self.links.close()
        self.rings.close()
        self.segments.close()


class Feed:
    """This rank's work in one push."""

    def __init__(self, rank: int, link: RankLink, held: Held, sequence: int, patience: Patience) -> None:
        self._rank = rank
        self._link = link
        self._held = held
        self._patience = patience
        self._inbox = Inbox(link, sequence, patience)
        self._senders: list[Sender] = []
        self._room = 0
        """Of the largest chunk."""
        self.unread: int | None = NOTHING
        """Last chunk of this rank's memory that the agent has still to read, once everything was exported. NOTHING:
        nobody reads any of it. None: the push's result says when nobody does (INV-12)."""

    def run(self, plan: rank_pb2.PushPlan, layout: Layout, tensors: Tensors, times: Times) -> None:
        """Export everything and bring it on its way. A rank without a part only takes part in the iteration.

        Raises:
            PushEnded: it was over before. LayoutInvalid, LimitExceeded, SlotMismatch, PeerLost, LinkFailed,
            DeadlineExceeded.
        """
        with times.stretch("gather"):
            self._held.groups.prepare(plan, self._inbox.check)
            parts = parts_of(plan, self._rank)
            self._held.links.prepare(parts, plan.link_host)
        with times.stretch("export"):
            if parts:
                self._export(plan, layout, parts, times.source(tensors))
                times.byte_count = layout.byte_count
            else:
                drain(times.source(tensors))

    def _export(self, plan: rank_pb2.PushPlan, layout: Layout, parts: list[Part], tensors: Tensors) -> None:
        whole, self.unread = keeps_whole(plan, self._rank), None
        layed_out = chunks_of(layout, plan, self._rank)
        segment = self._held.segments.acquire(layed_out.byte_count if whole else ring_bytes(layed_out))
        difference = difference_of(self._held.segments, parts, segment, layout, layed_out, plan.chunk_bytes)
        self._room = room_bytes(layed_out)
        self._senders = [self._sender(part, segment, difference) for part in parts]
        if plan.keep_whole and all(part.base is not None for part in parts):
            self._senders.append(self._for_the_agent(segment))
        self._held.links.meet(self._inbox.check)
        exporter = Exporter(layout, layed_out, self._memory(layed_out, segment, whole=whole))
        for chunk in exporter.chunks(tensors):
            self._inbox.check()
            if difference is not None:
                difference.take(chunk)
            for sender in self._senders:
                sender.send(chunk)
            if any(p.leader == self._rank for p in parts):
                failpoints.hit("rank.between_chunks", chunk.index)
        self._held.exported = weight_update_pb2.Base(version=plan.version, content_digest=exporter.content_digest)
        self._finish(Content(len(layed_out.chunks), exporter.byte_count, exporter.content_digest), parts)
        self.unread = None if whole else self._unread(parts, len(layed_out.chunks) - 1)

    def answer(self, kind: str, waited_for: str) -> rank_pb2.RankResponse:
        """The agent's next message of `kind`; see `Inbox.answer`."""
        return self._inbox.answer(kind, waited_for)

    def end(self) -> rank_pb2.PushResult | None:
        """The agent's answer to this rank's failure; None if it does not come."""
        try:
            return self.answer("push_result", "the agent to end the push").push_result
        except WeightplaneError:
            return None

    def _unread(self, parts: list[Part], last: int) -> int | None:
        """Of a ring: what goes by links has arrived, but for one that was lost with something on its way."""
        if self._held.links.busy or not all(p.traits.by_agent or p.traits.by_link for p in parts):
            return None
        copied = any(p.traits.by_agent for p in parts)
        return last if copied and self._inbox.released < last else NOTHING

    def _memory(self, plan: SegmentPlan, segment: Segment, *, whole: bool) -> ExportMemory:
        return WholeMemory(plan, segment.memory) if whole else RingMemory(plan, segment.memory, self._wait_free)

    def _wait_free(self, index: int) -> None:
        for sender in self._senders:
            sender.wait_free(index)

    def _for_the_agent(self, segment: Segment) -> Sender:
        """The agent may want to read the whole version, also where every engine is sent a delta."""
        return make_sender(self._means(Part(ranks=(self._rank,), transport=INLINE, engines=()), segment))

    def _sender(self, part: Part, segment: Segment, difference: Difference | None) -> Sender:
        means = self._means(part, segment)
        sender = make_sender(means)
        if part.base is None:
            return sender
        # The engines of a new link come when their streams are opened; these are, when it is known what they are sent.
        known = not part.traits.by_link or self._held.links.of(part).connected
        same = difference is not None and part.base == difference.base
        return DeltaSender(part, sender, means.announcer, difference if known and same else None)

    def _means(self, part: Part, segment: Segment) -> Means:
        announcer = Announcer(part, self._link, self._patience)
        held = self._held
        return Means(part, self._rank, announcer, segment, held.groups, held.links, self._inbox, held.rings, self._room)

    def _finish(self, content: Content, parts: list[Part]) -> None:
        for sender in self._senders:
            sender.finish(content)
        if any(p.leader == self._rank for p in parts):
            failpoints.hit("rank.after_push_end")


def chunks_of(layout: Layout, plan: rank_pb2.PushPlan, rank: int) -> SegmentPlan:
    """How a rank cuts a version. Chunks that travel while the next are exported begin small, so that they begin early.
    A version that is kept whole has as few as the plan asks for; and so has one that goes by device memory: ranks of a
    slot hand each other each chunk, so they cut alike, whatever else each of them feeds. `plan` is the rank's part."""
    if keeps_whole(plan, rank) or any(traits_of(a.transport).by_device for a in plan.assignments):
        return plan_segment(layout, plan.chunk_bytes)
    copied = all(part.transport == INLINE for part in parts_of(plan, rank))
    most = min(plan.chunk_bytes, COPIED_BYTES) if copied else plan.chunk_bytes
    return plan_segment(layout, most, FIRST_BYTES)


def drain(tensors: Tensors) -> None:
    """Iterate to the end: the iteration is a collective, and a rank that stops in it stops the others."""
    deque(tensors, maxlen=0)

"""Sending what changed: chunks are held back until it is known whether a delta is worth it, then go their part's way.

Promises: engines are sent the one or the other, and told before the first chunk (DeltaChosen); what they end up with
is the same. Where the rank has not the bytes of the base, or no room for the difference, or most of the bytes changed,
every byte goes, from the moment on when that is known; and over a link that is still to be made.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch

from controlplane.core.errors import LimitExceeded
from controlplane.core.layout import Layout
from trainer_agent.chunking import SegmentPlan
from trainer_agent.parts import Part
from trainer_agent.rank.delta import DeltaWriter
from trainer_agent.rank.exporter import ExportedChunk
from trainer_agent.rank.kept import KeptVersions
from trainer_agent.rank.senders.port import Announcer, Content, Sender
from trainer_agent.segments import Segment, SegmentPool
from weightplane.local.v1 import rank_pb2

log = structlog.get_logger(__name__)


class Difference:
    """Of the version that is being exported to the base. One for all parts; found while chunks are written."""

    def __init__(self, kept: KeptVersions, fresh: Segment, layout: Layout, plan: SegmentPlan, chunk_bytes: int) -> None:
        """`fresh` has the layout of the base: the whole version. The kept versions have a base."""
        assert kept.base is not None, "asked for only then"
        self.base = kept.base.name
        self._layout = layout
        self._plan = plan
        self._old = torch.frombuffer(kept.base.segment.memory, dtype=torch.uint8)
        self._new = torch.frombuffer(fresh.memory, dtype=torch.uint8)
        self._writer = DeltaWriter(layout, chunk_bytes, kept.place)
        self.worth_it = True
        """As far as is known."""

    def take(self, chunk: ExportedChunk) -> None:
        """The bytes of the chunk lie there: compare the tensors that it completes."""
        try:
            for record in chunk.records if self.worth_it else ():
                if record.HasField("checksum"):
                    self._compare(record.tensor, record.checksum)
        except LimitExceeded as error:
            log.warning("delta_given_up", cause=str(error))
            self.worth_it = False

    def _compare(self, tensor: int, checksum: bytes) -> None:
        start = self._plan.offsets[tensor]
        end = start + self._layout.tensors[tensor].byte_count
        self._writer.add(tensor, self._old[start:end], self._new[start:end], checksum)
        self.worth_it = self._writer.worth_it

    def chunks(self) -> list[ExportedChunk]:
        """All of them, once everything was taken. The last one is empty: it ends the delta."""
        found = [ExportedChunk(c.index, 0, c.byte_count, c.records, c.place) for c in self._writer.finish()]
        return [*found, ExportedChunk(len(found), 0, 0, ())]

    @property
    def byte_count(self) -> int:
        return self._writer.byte_count


def difference_of(
    segments: SegmentPool | KeptVersions,
    parts: Sequence[Part],
    fresh: Segment,
    layout: Layout,
    plan: SegmentPlan,
    chunk_bytes: int,
) -> Difference | None:
    """To what is kept, if the engines of some part hold just that (INV-5)."""
    if not isinstance(segments, KeptVersions) or segments.base is None:
        return None
    if all(part.base != segments.base.name for part in parts):
        return None
    return Difference(segments, fresh, layout, plan, chunk_bytes)


class DeltaSender:
    """A part whose engines hold the base."""

    def __init__(self, part: Part, way: Sender, announcer: Announcer, difference: Difference | None) -> None:
        """`way` brings chunks to the part's engines. Without a difference every byte goes."""
        self.part = part
        self._way = way
        self._announcer = announcer
        self._difference = difference
        self._held: list[ExportedChunk] = []
        self._chosen = False
        if difference is None:  # said at once: engines that are to come to a link wait for it
            self._choose(delta=False)

    def send(self, chunk: ExportedChunk) -> None:
        self._held.append(chunk)
        if self._difference is None or not self._difference.worth_it:
            self._send_held()

    def wait_free(self, index: int) -> None:
        raise NotImplementedError("a rank that sends deltas keeps whole versions: they are never in a ring")

    def finish(self, content: Content) -> None:
        if self._difference is None or not self._difference.worth_it:
            self._send_held()
            self._way.finish(content)
            return
        self._choose(delta=True)
        chunks = self._difference.chunks()
        for chunk in chunks:
            self._way.send(chunk)
        self._way.finish(Content(len(chunks), self._difference.byte_count, content.digest))

    def _send_held(self) -> None:
        self._choose(delta=False)
        held, self._held = self._held, []
        for chunk in held:
            self._way.send(chunk)

    def _choose(self, *, delta: bool) -> None:
        if self._chosen:
            return
        self._chosen = True
        choice = rank_pb2.DeltaChosen(engine_ids=self.part.engine_ids, delta=delta)
        self._announcer.say(rank_pb2.RankRequest(delta_chosen=choice))
        size = self._difference.byte_count if self._difference is not None else 0
        log.info("delta_chosen", engines=len(self.part.engines), delta=delta, delta_bytes=size)

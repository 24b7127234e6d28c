"""One push on one rank: export the weights, merge handles over the slot, announce each chunk to the agent.

Promises: a chunk is announced only after every rank of its slot has written it; the end of the push is noticed
between any two chunks and in every wait. Refuses to announce what it does not lead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from controlplane import failpoints
from controlplane.core.errors import WeightplaneError
from controlplane.core.layout import Layout
from controlplane.devices import host_id
from trainer_agent.chunking import plan_segment
from trainer_agent.rank.exporter import ExportedChunk, Exporter
from trainer_agent.rank.gather import GatherGroups
from trainer_agent.rank.link import Patience, RankLink
from trainer_agent.segments import Segment, SegmentPool
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import layout_pb2

Tensors = Iterator[tuple[str, torch.Tensor]]


class PushEnded(Exception):
    """The agent ended the push while this rank still worked on it."""

    def __init__(self, result: rank_pb2.PushResult) -> None:
        super().__init__(result.error_message)
        self.result = result


@dataclass(frozen=True, slots=True)
class _Part:
    """What this rank does for the engines of one slot."""

    ranks: tuple[int, ...]
    engine_ids: tuple[str, ...]
    device_uuid: str
    """Whose worker reads this rank's buffer; empty where any can: a slot of one rank feeds the whole engine."""


class Feed:
    """This rank's work in one push."""

    def __init__(
        self, rank: int, link: RankLink, pool: SegmentPool, groups: GatherGroups, sequence: int, patience: Patience
    ) -> None:
        self._rank = rank
        self._link = link
        self._pool = pool
        self._groups = groups
        self._sequence = sequence
        self._patience = patience

    def run(self, plan: rank_pb2.PushPlan, layout: Layout, tensors: Tensors) -> None:
        """Export everything and announce it. A rank without a part only takes part in the iteration.

        Raises:
            PushEnded: it was over before. LayoutInvalid, LimitExceeded, SlotMismatch, PeerLost, DeadlineExceeded.
        """
        self._groups.prepare(plan, self.check)
        parts = _parts(plan, self._rank)
        if not parts:
            drain(tensors)
            return
        layed_out = plan_segment(layout, plan.chunk_bytes)
        segment = self._pool.acquire(layed_out.byte_count)
        exporter = Exporter(layout, layed_out, segment.memory)
        for chunk in exporter.chunks(tensors):
            self.check()
            for part in parts:
                self._announce(chunk, part, segment)
            if any(p.ranks[0] == self._rank for p in parts):
                failpoints.hit("rank.between_chunks", chunk.index)
        self._end(parts, len(layed_out.chunks), exporter)

    def check(self) -> None:
        """Raises PushEnded if the agent has ended this push."""
        while (message := self._link.poll()) is not None:
            if message.WhichOneof("message") == "push_result" and message.push_result.sequence == self._sequence:
                raise PushEnded(message.push_result)

    def answer(self, kind: str, waited_for: str) -> rank_pb2.RankResponse:
        """The agent's next message of `kind` for this push; older ones are dropped.

        Raises:
            PushEnded: it is the result, and something else was asked for. DeadlineExceeded.
        """
        while True:
            message = self._link.receive(self._patience, "push", waited_for)
            got = message.WhichOneof("message")
            if got not in ("push_plan", "push_result") or getattr(message, got).sequence != self._sequence:
                continue
            if got == kind:
                return message
            if got == "push_result":
                raise PushEnded(message.push_result)

    def end(self) -> rank_pb2.PushResult | None:
        """The agent's answer to this rank's failure; None if it does not come."""
        try:
            return self.answer("push_result", "the agent to end the push").push_result
        except WeightplaneError:
            return None

    def _announce(self, chunk: ExportedChunk, part: _Part, segment: Segment) -> None:
        place = layout_pb2.SharedMemoryRange(
            segment=segment.name, host_id=host_id(), offset=chunk.start, byte_count=chunk.byte_count
        )
        buffers = [layout_pb2.BufferHandle(device_uuid=part.device_uuid, shared_memory=place)]
        message = rank_pb2.SendChunk(engine_ids=part.engine_ids, index=chunk.index, records=chunk.records)
        if len(part.ranks) > 1:
            content = message.SerializeToString(deterministic=True)
            merged = self._groups.merge(part.ranks, buffers[0].SerializeToString(), content, self.check)
            buffers = [layout_pb2.BufferHandle.FromString(m) for m in merged]
        if part.ranks[0] == self._rank:
            message.buffers.extend(buffers)
            self._link.send(rank_pb2.RankRequest(send_chunk=message), self._patience)

    def _end(self, parts: list[_Part], chunk_count: int, exporter: Exporter) -> None:
        led = [e for p in parts if p.ranks[0] == self._rank for e in p.engine_ids]
        if not led:
            return
        end = rank_pb2.PushEnd(
            engine_ids=led,
            chunk_count=chunk_count,
            byte_count=exporter.byte_count,
            content_digest=exporter.content_digest,
        )
        self._link.send(rank_pb2.RankRequest(push_end=end), self._patience)
        failpoints.hit("rank.after_push_end")


def drain(tensors: Tensors) -> None:
    """Iterate to the end: the iteration is a collective, and a rank that stops in it stops the others."""
    deque(tensors, maxlen=0)


def _parts(plan: rank_pb2.PushPlan, rank: int) -> list[_Part]:
    """Engines with the same ranks get the same chunks. In one order on every rank, since merging is a collective."""
    engines: dict[tuple[int, ...], list[str]] = {}
    devices: dict[tuple[int, ...], str] = {}
    for assignment in plan.assignments:
        ranks = tuple(assignment.ranks)
        engines.setdefault(ranks, []).append(assignment.engine.engine_id)
        devices[ranks] = assignment.device_uuids[ranks.index(rank)] if len(ranks) > 1 else ""
    return [_Part(r, tuple(sorted(engines[r])), devices[r]) for r in sorted(engines)]

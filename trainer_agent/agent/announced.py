"""What the leaders of one push announced: a log for each engine, and what all leaders must agree on.

Promises: an engine's chunks come from its leader alone, in order; all leaders end with one content, for it is one
version; a rank that keeps two chunks only is told when the first of them has been read by every stream that reads its
memory, and waits for no other (INV-12).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from controlplane.core.errors import SlotMismatch
from trainer_agent.agent.chunk_log import ChunkLog, Ring
from trainer_agent.parts import keep_two
from trainer_agent.transports import traits_of
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2

Release = Callable[[int, int], None]
"""Rank and chunk: its memory may be written again, up to this chunk."""


class Announced:
    """Of one push, from its plan on."""

    def __init__(self, plan: rank_pb2.PushPlan, release: Release) -> None:
        self.digest = b""
        """Of the content, once a leader has announced everything."""
        self._leaders = {a.engine.engine_id: a.leader for a in plan.assignments}
        self.logs: dict[str, ChunkLog] = {}
        in_pieces = keep_two(plan)
        rings = {rank: Ring(partial(release, rank)) for a in plan.assignments for rank in a.ranks}
        for a in plan.assignments:
            lent = _lent_by(a, in_pieces)
            log = self.logs[a.engine.engine_id] = ChunkLog(
                ring=bool(lent) or a.leader in in_pieces, choice=a.HasField("base")
            )
            for rank in lent:
                rings[rank].follow(log)
        self._own = {r: ChunkLog() for r in set(self._leaders.values())}
        """By rank: what it announces for this agent alone."""

    @property
    def whole(self) -> list[rank_pb2.SendChunk] | None:
        """Every chunk of a leader that announced everything, if there is one."""
        logs = [*self.logs.values(), *self._own.values()]
        return next((log.whole for log in logs if log.whole is not None), None)

    def take_choice(self, rank: int, choice: rank_pb2.DeltaChosen) -> None:
        """A leader says what its engines are sent. Raises SlotMismatch, FrameOutOfOrder."""
        for log in self._logs(rank, choice.engine_ids):
            log.choose(delta=choice.delta)

    def take_chunk(self, rank: int, chunk: rank_pb2.SendChunk) -> None:
        """A leader announced a chunk. Raises SlotMismatch, FrameOutOfOrder, LimitExceeded."""
        for log in self._logs(rank, chunk.engine_ids):
            log.add(chunk)

    def take_end(self, rank: int, end: rank_pb2.PushEnd) -> None:
        """A leader announced everything. Raises SlotMismatch, FrameOutOfOrder."""
        if self.digest and end.content_digest != self.digest:
            ranks = f"rank {rank}: {end.content_digest[:6].hex()}, others: {self.digest[:6].hex()}"
            raise SlotMismatch(engine_id=", ".join(end.engine_ids), what="the weights' content", ranks=ranks)
        self.digest = end.content_digest
        for log in self._logs(rank, end.engine_ids):
            log.finish(end)

    def check_link(self, rank: int, made: rank_pb2.LinkMade) -> None:
        """A link is its engines' leader's. Raises SlotMismatch."""
        self._logs(rank, made.engine_ids)

    def check_exports(self, rank: int, made: rank_pb2.ExportsMade) -> None:
        """So are exports. Raises SlotMismatch."""
        self._logs(rank, made.engine_ids)

    def _logs(self, rank: int, engine_ids: Sequence[str]) -> list[ChunkLog]:
        for engine_id in engine_ids:
            if self._leaders.get(engine_id) != rank:
                what = f"chunks for {engine_id} from rank {rank}"
                raise SlotMismatch(engine_id=engine_id, what="who leads", ranks=what)
        if not engine_ids and rank in self._own:
            return [self._own[rank]]
        return [self.logs[e] for e in engine_ids]


def _lent_by(a: fleet_pb2.Assignment, in_pieces: AbstractSet[int]) -> list[int]:
    """Ranks that write a chunk again only when the engine's stream has read it (INV-12): with device memory each of the
    slot, else the leader that the agent reads out of a ring of two chunks."""
    traits = traits_of(a.transport)
    if traits.by_device:
        return list(a.ranks)
    return [a.leader] if traits.by_agent and a.leader in in_pieces else []

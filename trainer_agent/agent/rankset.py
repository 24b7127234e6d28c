"""The ranks of one life of a trainer: who has joined, what they agree on, who is gone. No I/O.

Promises: a set is complete only with every rank, one model, one world size and one layout. A set that lost a rank is
broken for good: its next life is another set.
"""

from __future__ import annotations

import uuid

from controlplane.core.errors import FrameInvalid, LayoutInvalid, PeerLost, WeightplaneError
from controlplane.core.layout import Layout
from controlplane.rpc.codec import layout_from_parts
from controlplane.software import MEGATRON, TORCH, software
from trainer_agent.agent.load import load_of
from trainer_agent.agent.ranks import RankConnection
from trainer_agent.transports import sends
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, weight_update_pb2

MAX_LOST_RANKS = 64
"""As many a status names: the first is the cause of the others, as a rule."""
MAX_CAUSE_LENGTH = 1024


class RankSet:
    """One life of the set of ranks."""

    def __init__(self, first: rank_pb2.Join, model: str) -> None:
        self.incarnation = uuid.uuid4().hex
        self.restart_count = first.restart_count
        self.world_size = first.world_size
        self.model = model or first.model
        self.members: dict[int, RankConnection] = {}
        self.lost: PeerLost | None = None
        """Why the set is broken."""
        self.term = 0
        """Of the lease; 0 until the coordinator gave it."""
        self.opened = False
        """A session was opened for it."""
        self.layout: Layout | None = None
        self.parts: list[weight_update_pb2.LayoutPart] = []
        self.holds_devices = False
        """Engines on its devices sleep for this trainer, or may."""
        self.gone: dict[int, tuple[RankConnection, str]] = {}
        """Ranks that were here, and how each ended."""
        self._progress: dict[int, tuple[int, str]] = {}
        self.progress = 0
        """Grows whenever step or phase moved on any rank: what renews the lease."""

    def add(self, connection: RankConnection) -> None:
        """A rank joins.

        Raises:
            FrameInvalid: it does not belong here.
        """
        join = connection.join
        if join.world_size != self.world_size:
            raise _invalid("world_size", f"rank {join.rank} says {join.world_size}, others {self.world_size}")
        if join.model != self.model:
            raise _invalid("model", f"this agent trains {self.model!r}, rank {join.rank} says {join.model!r}")
        if not 0 <= join.rank < self.world_size or join.rank in self.members:
            raise _invalid("rank", f"{join.rank} of {self.world_size} is not free")
        self.members[join.rank] = connection

    def add_part(self, part: rank_pb2.LayoutPartMessage) -> None:
        """A part of the layout, in order. Raises LayoutInvalid, FrameInvalid."""
        if part.index != len(self.parts):
            raise _invalid("layout_part", f"expected part {len(self.parts)}, got {part.index}")
        made = weight_update_pb2.LayoutPart(index=part.index, count=part.count, format=part.format)
        made.tensors.extend(part.tensors)
        made.ties.extend(part.ties)
        self.parts.append(made)
        if len(self.parts) == part.count:
            self.layout = layout_from_parts(self.parts)

    @property
    def complete(self) -> bool:
        return len(self.members) == self.world_size and self.layout is not None

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.world_size)) - self.members.keys())

    @property
    def ended(self) -> bool:
        """Nobody is left of it."""
        return not self.members

    def disagreement(self) -> LayoutInvalid | None:
        """Why the ranks of a complete set cannot push together."""
        stated = {r: bytes(c.join.layout_digest) for r, c in sorted(self.members.items())}
        assert self.layout is not None, "asked of a complete set"
        if set(stated.values()) == {self.layout.digest}:
            return None
        by_rank = [f"rank {r}: {d[:6].hex()}" for r, d in stated.items()]
        return LayoutInvalid(problem="the ranks state different layouts", names=by_rank)

    def remove(self, connection: RankConnection, cause: str) -> bool:
        """A rank is gone. False: it was none of these."""
        if self.members.get(connection.rank) is not connection:
            return False
        del self.members[connection.rank]
        self.gone[connection.rank] = (connection, cause)
        self.lost = self.lost or PeerLost(peer=f"rank {connection.rank}", cause=cause)
        return True

    def moved(self, rank: int, step: int, phase: str) -> None:
        """Note what a rank does now."""
        if self._progress.get(rank) != (step, phase):
            self._progress[rank] = (step, phase)
            self.progress += 1

    def progress_of(self, rank: int) -> tuple[int, str]:
        """Step and phase that it last told."""
        return self._progress.get(rank, (0, ""))

    def doing(self, rank: int) -> str:
        """The same, for people."""
        step, phase = self.progress_of(rank)
        return f"phase {phase or 'unknown'}, step {step}"

    def status(self) -> fleet_pb2.TrainerStatus:
        """What the coordinator is told: the slowest rank's step and phase."""
        step, phase = min(self._progress.values(), default=(0, ""))
        return fleet_pb2.TrainerStatus(
            term=self.term,
            step=step,
            phase=phase[:64],
            progress=self.progress,
            holds_devices=self.holds_devices,
            lost_ranks=[
                fleet_pb2.LostRank(rank=rank, cause=cause[:MAX_CAUSE_LENGTH]) for rank, cause in self._lost_ranks()
            ],
        )

    def _lost_ranks(self) -> list[tuple[int, str]]:
        """Who ended without leaving, and how."""
        lost = [(rank, cause) for rank, (connection, cause) in self.gone.items() if not connection.left]
        return lost[:MAX_LOST_RANKS]

    def hello(self, run_id: str, trainer_id: str, chunk_bytes: int, link_host: str = "") -> fleet_pb2.TrainerHello:
        """Who this complete set is, and what it will send."""
        assert self.layout is not None, "asked of a complete set"
        hello = fleet_pb2.TrainerHello(
            run_id=run_id,
            model=self.model,
            trainer_id=trainer_id,
            incarnation=self.incarnation,
            transports=sends(link_host, device_memory=all(c.join.device_memory for c in self.members.values())),
            load=load_of(self.layout, chunk_bytes),
            software=software((TORCH, MEGATRON)),
        )
        for rank, connection in sorted(self.members.items()):
            join = connection.join
            hello.ranks.add(rank=rank, host_id=join.host_id, device_uuid=join.device_uuid)
        return hello

    def send(self, response: rank_pb2.RankResponse) -> None:
        """To everybody."""
        for connection in self.members.values():
            connection.send(response)

    def refuse(self, error: WeightplaneError, *, fenced: bool = False) -> None:
        """End everybody's session."""
        for connection in self.members.values():
            connection.refuse(error, fenced=fenced)


def _invalid(field: str, problem: str) -> FrameInvalid:
    return FrameInvalid(message="Join", field=field, problem=problem)

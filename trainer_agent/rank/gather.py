"""Gather groups: the ranks of one slot hand each chunk's buffer handle to each other, and agree on what is in it.

A group is a raw gloo process group of exactly the slot's ranks: independent of the trainer's own groups, over
loopback, with its rendezvous in the trainer agent's private directory. Every rank makes its groups in the plan's
one total order, compares the plan's digest before the first collective, and waits for nothing without a
deadline. A group lives while its members are unchanged, and ends with the push that failed in it.

Refuses to merge what differs: names, shapes, order and checksums of a chunk agree on all ranks, or SLOT_MISMATCH.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from controlplane import collectives
from controlplane.collectives import Between, first_line
from controlplane.core.errors import DeadlineExceeded, PeerLost, SlotMismatch
from trainer_agent.forks import let_go_in_children
from weightplane.local.v1 import rank_pb2

JOIN_SECONDS = 60.0
"""Longest wait for the slot's other ranks to come to the rendezvous."""
PAYLOAD_BYTES = 2048
"""Bytes that each rank contributes to one exchange: a buffer handle (at most 500 bytes) and a digest fit."""
_LENGTH_BYTES = 2

_c10d: Any = dist
"""Stores are public in torch.distributed, but not in its stubs."""


@dataclass(frozen=True, slots=True)
class SlotKey:
    """Whose group it is. Engines with the same ranks share it; the first of them names it in errors."""

    engine_id: str
    ranks: tuple[int, ...]


class GatherGroup:
    """The group of one slot, seen from one of its ranks."""

    def __init__(self, slot: SlotKey, rank: int, store_path: Path, plan: rank_pb2.PushPlan, between: Between) -> None:
        """Meet the others, compare plans, connect.

        Raises:
            DeadlineExceeded: not all came. SlotMismatch: they hold different plans. PeerLost: one went away.
        """
        self.slot = slot
        self._path = store_path
        store = _c10d.FileStore(str(store_path), -1)
        store.set_timeout(timedelta(seconds=collectives.OPERATION_SECONDS))
        _meet(store, slot, rank, bytes(plan.plan_digest), between)
        self._group = self._connect(store, rank)
        let_go_in_children(self._group.sockets)

    def exchange(self, payload: bytes, between: Between) -> list[bytes]:
        """Give every rank of the slot `payload`, and get theirs, in the order of the slot's ranks.

        Raises:
            PeerLost: a rank of the slot went away or did not come in time; the group is of no use any more.
        """
        mine = _padded(payload)
        theirs = [torch.empty_like(mine) for _ in self.slot.ranks]
        try:
            collectives.end(self._group.allgather(theirs, mine), between)
        except RuntimeError as error:
            raise PeerLost(peer=f"a rank of the slot of {self.slot.engine_id}", cause=first_line(error)) from error
        self._path.unlink(missing_ok=True)
        return [_unpadded(t) for t in theirs]

    def destroy(self) -> None:
        """Close its connections, which also ends what the others wait for."""
        self._path.unlink(missing_ok=True)
        self._group.close()

    def _connect(self, store: Any, rank: int) -> collectives.Group:
        ranks = self.slot.ranks
        try:
            keys = collectives.prefixed("gather", store)
            return collectives.Group(keys, ranks.index(rank), len(ranks), host="127.0.0.1")
        except RuntimeError as error:
            raise PeerLost(peer=f"a rank of the slot of {self.slot.engine_id}", cause=first_line(error)) from error


class GatherGroups:
    """All gather groups of one rank."""

    def __init__(self, rank: int, directory: Path) -> None:
        self._rank = rank
        self._directory = directory
        self._groups: dict[tuple[int, ...], GatherGroup] = {}

    def prepare(self, plan: rank_pb2.PushPlan, between: Between) -> None:
        """Have a group for each shared slot that this rank belongs to; end those whose slot is gone."""
        slots = [s for s in shared_slots(plan) if self._rank in s.ranks]
        for gone in self._groups.keys() - {s.ranks for s in slots}:
            self._groups.pop(gone).destroy()
        for slot in slots:
            if slot.ranks not in self._groups:
                path = self._directory / _store_name(plan, slot)
                self._groups[slot.ranks] = GatherGroup(slot, self._rank, path, plan, between)

    def merge(self, ranks: Sequence[int], handle: bytes, content: bytes, between: Between) -> list[bytes]:
        """Everybody's handle for one chunk. `content` says what is in it, and has to be equal.

        Raises:
            SlotMismatch, PeerLost.
        """
        group = self._groups[tuple(ranks)]
        digest = hashlib.sha256(content).digest()
        answers = group.exchange(digest + handle, between)
        digests = [a[: len(digest)] for a in answers]
        if len(set(digests)) > 1:
            raise _disagreement(group.slot, "names, shapes, order or checksums of a chunk", digests)
        return [a[len(digest) :] for a in answers]

    def close(self) -> None:
        """End all groups."""
        for group in self._groups.values():
            group.destroy()
        self._groups.clear()

    def __len__(self) -> int:
        return len(self._groups)


def shared_slots(plan: rank_pb2.PushPlan) -> list[SlotKey]:
    """The plan's slots of several ranks, each set of ranks once, in one order on every rank."""
    found: dict[tuple[int, ...], SlotKey] = {}
    for slot in sorted(plan.shared_slots, key=lambda s: (tuple(s.ranks), s.engine_id)):
        found.setdefault(tuple(slot.ranks), SlotKey(slot.engine_id, tuple(slot.ranks)))
    return list(found.values())


def _meet(store: Any, slot: SlotKey, rank: int, digest: bytes, between: Between) -> None:
    store.set(f"plan/{rank}", digest.hex())
    keys = [f"plan/{r}" for r in slot.ranks]
    if collectives.wait_for_keys(store, keys, JOIN_SECONDS, between):
        raise DeadlineExceeded(
            phase="gather_group", waited_for=f"the slot of {slot.engine_id}", waited_seconds=JOIN_SECONDS
        )
    digests = [store.get(k) for k in keys]
    if len(set(digests)) > 1:
        raise _disagreement(slot, "the plan", digests)


def _disagreement(slot: SlotKey, what: str, digests: Sequence[bytes]) -> SlotMismatch:
    by_rank = ", ".join(f"rank {r}: {d[:6].hex()}" for r, d in zip(slot.ranks, digests, strict=True))
    return SlotMismatch(engine_id=slot.engine_id, what=what, ranks=by_rank)


def _store_name(plan: rank_pb2.PushPlan, slot: SlotKey) -> str:
    """The update is in the key: nothing of an earlier group can be met under it."""
    key = f"{plan.plan_revision}/{bytes(plan.plan_digest).hex()}/{plan.update_id}/{slot.engine_id}/{slot.ranks}"
    return f"group-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _padded(payload: bytes) -> torch.Tensor:
    if len(payload) > PAYLOAD_BYTES - _LENGTH_BYTES:
        raise ValueError(f"an exchange carries at most {PAYLOAD_BYTES - _LENGTH_BYTES} bytes, not {len(payload)}")
    whole = (len(payload).to_bytes(_LENGTH_BYTES, "big") + payload).ljust(PAYLOAD_BYTES, b"\0")
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def _unpadded(tensor: torch.Tensor) -> bytes:
    whole = bytes(tensor.numpy())
    length = int.from_bytes(whole[:_LENGTH_BYTES], "big")
    return whole[_LENGTH_BYTES : _LENGTH_BYTES + length]

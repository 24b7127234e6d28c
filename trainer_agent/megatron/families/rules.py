"""How one Megatron parameter and its Hugging Face tensors are made of each other.

A rule is pure: it knows layouts, never process groups. `to_hf` takes the tensor-parallel shards of one
parameter, in rank order, and gives whole tensors; `to_megatron` takes whole tensors and gives one rank's
shard. The two are inverse, bit for bit. No rule computes with values; they only move them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """The shard to fill: which of how many tensor-parallel ranks, and the shape that rank's parameter has."""

    rank: int
    size: int
    shape: tuple[int, ...]


class Rule(Protocol):
    @property
    def sharded(self) -> bool:
        """False when every tensor-parallel rank holds the whole parameter; `to_hf` then gets one shard."""
        ...

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]: ...

    def to_megatron(self, tensors: Sequence[Tensor], place: Place) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor under its checkpoint name, with the shape that the model's config declares."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter, by its name with the *global* layer and expert number, and the tensors it holds."""

    megatron: str
    hf: tuple[HfTensor, ...]
    rule: Rule
    expert: int | None = None
    """Which expert it belongs to, counted over the model; experts are split over groups of their own."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank holds all of it: norms, routers."""

    sharded = False

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (shards[0],)

    def to_megatron(self, tensors: Sequence[Tensor], place: Place) -> Tensor:
        return tensors[0]


@dataclass(frozen=True, slots=True)
class Split:
    """Cut along one dimension: 0 for column-parallel weights, 1 for row-parallel ones."""

    dim: int
    sharded = True

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_join(shards, self.dim),)

    def to_megatron(self, tensors: Sequence[Tensor], place: Place) -> Tensor:
        return _part(tensors[0], self.dim, place)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows are token ids. Megatron pads them so that every rank has as many; the padding never leaves it."""

    rows: int
    sharded = True

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_join(shards, 0)[: self.rows],)

    def to_megatron(self, tensors: Sequence[Tensor], place: Place) -> Tensor:
        rows = place.shape[0]
        mine = tensors[0][rows * place.rank : rows * (place.rank + 1)]
        padding = mine.new_zeros(rows - mine.shape[0], *mine.shape[1:])
        return torch.cat([mine, padding])


@dataclass(frozen=True, slots=True)
class QueryKeyValue:
    """Megatron keeps, for each key/value head, its query heads' rows, then its key's, then its value's."""

    heads: int
    kv_heads: int
    head_dim: int
    sharded = True

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        joined = _join(shards, 0)
        tail = joined.shape[1:]
        queries = self.heads // self.kv_heads
        groups = joined.reshape(self.kv_heads, queries + 2, self.head_dim, *tail)
        parts = groups[:, :queries], groups[:, queries], groups[:, queries + 1]
        return tuple(x.reshape(-1, *tail) for x in parts)

    def to_megatron(self, tensors: Sequence[Tensor], place: Place) -> Tensor:
        tail = tensors[0].shape[1:]
        groups = [t.reshape(self.kv_heads, -1, self.head_dim, *tail) for t in tensors]
        return _part(torch.cat(groups, dim=1).reshape(-1, *tail), 0, place)


@dataclass(frozen=True, slots=True)
class GateUp:
    """Gate and up projection in one: a rank's shard is its part of the gate, then its part of the up projection."""

    sharded = True

    def to_hf(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return _join([gate for gate, _ in halves], 0), _join([up for _, up in halves], 0)

    def to_megatron(self, tensors: Sequence[Tensor], place: Place) -> Tensor:
        return torch.cat([_part(t, 0, place) for t in tensors])


def mismatches(entry: Entry, shard_shape: tuple[int, ...], tensor_parallel: int) -> list[str]:
    """What does not fit when shards of this shape are put together as the entry says; empty if all does."""
    shards = [torch.empty(shard_shape, device="meta")] * (tensor_parallel if entry.rule.sharded else 1)
    try:
        got = [tuple(t.shape) for t in entry.rule.to_hf(shards)]
    except RuntimeError as error:
        return [f"{entry.megatron} of shape {shard_shape} x {tensor_parallel}: {error}"]
    return [
        f"{want.name}: the config declares {want.shape}, {entry.megatron} x {tensor_parallel} holds {have}"
        for want, have in zip(entry.hf, got, strict=True)
        if want.shape != have
    ]


def _join(shards: Sequence[Tensor], dim: int) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)


def _part(tensor: Tensor, dim: int, place: Place) -> Tensor:
    length, rest = divmod(tensor.shape[dim], place.size)
    if rest:
        raise ValueError(f"{tensor.shape[dim]} rows do not divide over {place.size} tensor-parallel ranks")
    return tensor.narrow(dim, length * place.rank, length)

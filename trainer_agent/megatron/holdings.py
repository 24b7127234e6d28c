"""Who holds which parameter: what the ranks of a model tell each other once, before anything is gathered.

Promises that every rank comes to the same answer or refuses for the same reasons: parameters that the family does
not know, that nobody holds, that ranks hold differently, whose shapes are not the config's. So no rank meets a
misfit later, alone, in a collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_agent.megatron.collectives import Collectives
from trainer_agent.megatron.errors import UnsupportedModel
from trainer_agent.megatron.families.rules import Entry, mismatches

GATHERED = "what each rank holds"


@dataclass(frozen=True, slots=True)
class Held:
    """Where a parameter is, and its shard's shape and dtype, which all its shards have."""

    stage: int
    """Pipeline rank."""
    expert_rank: int | None
    """Expert-parallel rank; None: each of them holds it."""
    shape: tuple[int, ...]
    dtype: torch.dtype


Holdings = Mapping[str, Held]


def agree(
    local: Mapping[str, Tensor], entries: Sequence[Entry], refusals: Iterable[str], collectives: Collectives
) -> Holdings:
    """The same on every rank. Collective over all of them.

    Raises:
        UnsupportedModel: on every rank, for what any of them refuses. GatherFailed.
    """
    groups = collectives.groups
    experts = {entry.megatron for entry in entries if entry.expert is not None}
    held: dict[str, Held] = {}
    for name, tensor in local.items():
        expert_rank = groups.expert.rank if name in experts else None
        held[name] = Held(groups.pipeline.rank, expert_rank, tuple(tensor.shape), tensor.dtype)
    problems = list(refusals)
    for group in (groups.expert, groups.pipeline):
        answers = collectives.exchange([_to_json(held), problems], group, GATHERED)
        held, problems = _merged(answers)
    problems += misfits(held, entries, groups.tensor.size, groups.expert_tensor.size)
    digest = hashlib.sha256(repr(sorted(held.items(), key=lambda item: item[0])).encode()).hexdigest()
    answers = collectives.exchange([digest, problems], groups.world, GATHERED)
    if not problems and len({answer[0] for answer in answers}) > 1:
        problems = ["replicas of the model hold other parameters than each other"]
    problems += [problem for _, theirs in answers for problem in theirs]
    if problems:
        raise UnsupportedModel("; ".join(dict.fromkeys(problems)))
    return held


def misfits(held: Holdings, entries: Sequence[Entry], tensor_parallel: int, expert_tensor_parallel: int) -> list[str]:
    """What the model has and its config does not say, or the other way round."""
    known = {entry.megatron for entry in entries}
    unknown = [f"{name} has no mapping" for name in held if name not in known]
    missing = [f"{name} is on no stage" for name in sorted(known - held.keys())]
    wrong = [
        problem
        for entry in entries
        if entry.megatron in held
        for problem in mismatches(
            entry,
            held[entry.megatron].shape,
            tensor_parallel if entry.expert is None else expert_tensor_parallel,
        )
    ]
    return unknown + missing + wrong


def _merged(answers: Iterable[Any]) -> tuple[dict[str, Held], list[str]]:
    held: dict[str, Held] = {}
    problems: list[str] = []
    for theirs, refused in answers:
        theirs = _from_json(theirs)
        differing = [name for name in theirs.keys() & held.keys() if theirs[name] != held[name]]
        problems += refused + [f"{name} is held twice, differently" for name in sorted(differing)]
        held |= theirs
    return held, problems


def _to_json(held: Holdings) -> list[Any]:
    return [[name, h.stage, h.expert_rank, h.shape, str(h.dtype)] for name, h in held.items()]


def _from_json(answer: list[Any]) -> dict[str, Held]:
    return {
        name: Held(stage, expert_rank, tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
        for name, stage, expert_rank, shape, dtype in answer
    }

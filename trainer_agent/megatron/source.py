"""A Megatron model as a `WeightSource`: whole tensors under Hugging Face names, on every rank.

Covers any tensor, pipeline (virtual too), context, data, expert and expert-tensor parallelism that Megatron sets
up. Iterating is a collective over the tensor-, pipeline- and expert-parallel groups. Each parameter's shard goes
from the stage that holds it to the other stages, an expert's also from the expert-parallel rank that holds it to
the others, then the shards of one tensor-parallel group are put together. So every rank, context- and data-parallel
replicas too, yields every tensor whole, in the order of `metadata()`, and holds a few times the largest single
parameter's bytes besides the model: of a mixture of experts one expert's, not the layer's.

What would ship wrong weights in silence is refused at construction, on all ranks alike: parameters that the
family does not know, missing ones, shapes that are not the config's, heads that are divided otherwise, and what
`checks.REFUSED` lists. Parameters whose gather Megatron has put off (`overlap_param_gather`) are gathered first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from controlplane.core.errors import LayoutInvalid
from trainer_agent.megatron.checks import absent, refusals
from trainer_agent.megatron.collectives import GATHER_DEADLINE_SECONDS, Collectives
from trainer_agent.megatron.errors import GatherFailed, UnsupportedModel
from trainer_agent.megatron.families import family_of, read_config
from trainer_agent.megatron.families.decoder import HF_EMBEDDING, HF_OUTPUT, OUTPUT
from trainer_agent.megatron.families.rules import Entry
from trainer_agent.megatron.holdings import Held, agree
from trainer_agent.megatron.parameters import chunks_of, named_parameters
from trainer_agent.source import LayerwiseSource, ParamMeta

__all__ = ["GATHER_DEADLINE_SECONDS", "GatherFailed", "MegatronSource", "UnsupportedModel"]


class MegatronSource(LayerwiseSource):
    """Weights of a GPTModel for `TrainerRank`.

    Args:
        model: a GPTModel or its virtual-pipeline chunks, bare or inside DDP and Float16Module.
        hf_config: a model directory, its config.json as a dict, or a transformers config.
        deadline_seconds: for each collective.

    Construction is a collective over all ranks.

    Raises:
        UnsupportedModel: the model is not what its config and family say. GatherFailed.
    """

    def __init__(self, model: Any, hf_config: Any, *, deadline_seconds: float = GATHER_DEADLINE_SECONDS) -> None:
        config = read_config(hf_config)
        family = family_of(config)
        shape = family.shape(config)
        self._chunks = chunks_of(model)
        self._collectives = Collectives(deadline_seconds)
        self._tied = shape.tied
        self._entries = tuple(family.entries(shape))
        self._held = agree(self._local(), self._entries, refusals(self._chunks, shape), self._collectives)

    def metadata(self) -> list[ParamMeta]:
        """Names and shapes as the config declares them, dtypes as the model holds them; on every rank the same."""
        return [
            ParamMeta(tensor.name, self._held[entry.megatron].dtype, tensor.shape)
            for entry in self._entries
            for tensor in entry.hf
        ]

    def ties(self) -> Sequence[tuple[str, str]]:
        return [(HF_OUTPUT, HF_EMBEDDING)] if self._tied else []

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """A collective over all ranks, each of which has to iterate to the end.

        Raises:
            LayoutInvalid: on all ranks, before anything is yielded, when some rank's parameters are not there: their
                memory was taken away (offloading), or they were replaced.
            GatherFailed: a peer did not take part within the deadline, or an earlier iteration was left in its middle.
        """
        self._gather_stale_parameters()
        local = self._local()
        self._agree_on_presence(absent(local, self._owned()))
        gathered = 0
        try:
            for entry in self._entries:
                tensors = _tensors(entry, self._shards(entry, local.get(entry.megatron)))
                gathered += 1
                yield from tensors
        finally:
            if gathered < len(self._entries):
                self._collectives.give_up("an iteration was left before its end")

    def _local(self) -> dict[str, Tensor]:
        local = {name: parameter.detach() for name, parameter in named_parameters(self._chunks)}
        if self._tied:
            # The last stage's copy of a tied embedding; the first stage's is the one that is exported.
            local.pop(OUTPUT, None)
        return local

    def _owned(self) -> dict[str, Held]:
        """What this rank said it holds."""
        groups = self._collectives.groups
        stage, expert_ranks = groups.pipeline.rank, (None, groups.expert.rank)
        return {n: h for n, h in self._held.items() if h.stage == stage and h.expert_rank in expert_ranks}

    def _agree_on_presence(self, gone: list[str]) -> None:
        answers = self._collectives.exchange(gone, self._collectives.groups.world, "what each rank still holds")
        names = sorted({name for theirs in answers for name in theirs})
        if names:
            raise LayoutInvalid(problem="parameters are offloaded or replaced since the source was made", names=names)

    def _gather_stale_parameters(self) -> None:
        """With overlap_param_gather, parameters are old until the next forward; exporting would ship them."""
        for chunk in self._chunks:
            ddp_config = getattr(chunk, "ddp_config", None)
            if ddp_config is not None and ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _shards(self, entry: Entry, mine: Tensor | None) -> list[Tensor]:
        """The parameter's tensor-parallel shards, on every rank, wherever it is held."""
        held, groups = self._held[entry.megatron], self._collectives.groups
        shard = self._here(mine, held)
        if entry.expert is None or groups.expert.rank == held.expert_rank:
            self._collectives.broadcast(shard, groups.pipeline, held.stage, entry.megatron)
        if held.expert_rank is not None:
            self._collectives.broadcast(shard, groups.expert, held.expert_rank, entry.megatron)
        if not entry.rule.sharded:
            return [shard]
        among = groups.tensor if entry.expert is None else groups.expert_tensor
        return self._collectives.all_gather(shard, among, entry.megatron)

    def _here(self, mine: Tensor | None, held: Held) -> Tensor:
        """This rank's shard where collectives can take it, or room for another rank's."""
        if mine is None:
            return torch.empty(held.shape, dtype=held.dtype, device=self._collectives.device)
        return mine.to(self._collectives.device).contiguous()


def _tensors(entry: Entry, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What one parameter holds. Once it has ended, nothing holds the shards: the next ones need room."""
    for declared, tensor in zip(entry.hf, entry.rule.to_hf(shards), strict=True):
        yield declared.name, tensor.contiguous()

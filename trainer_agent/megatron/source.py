"""A Megatron model as a `WeightSource`: whole tensors under Hugging Face names, on every rank.

Iterating is a collective over the tensor- and pipeline-parallel groups. Each parameter's shard goes from
the stage that holds it to the other stages, then the shards of one tensor-parallel group are put together;
so every rank yields every tensor whole, in the order of `metadata()`, and holds about one layer's bytes
besides the model. What would ship wrong weights in silence is refused at construction, on all ranks alike:
parameters that the family does not know, missing ones, shapes that are not the config's, norms stored
minus one. Parameters whose gather Megatron has put off (`overlap_param_gather`) are gathered first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from trainer_agent.megatron.families import family_of, read_config
from trainer_agent.megatron.families.decoder import HF_EMBEDDING, HF_OUTPUT, OUTPUT, UnsupportedModel
from trainer_agent.megatron.families.rules import Entry, mismatches
from trainer_agent.megatron.parameters import chunks_of, named_parameters, unwrap
from trainer_agent.source import ParamMeta

GATHER_DEADLINE_SECONDS = 120.0
"""For one collective. A peer that died or left the iteration early ends the push, not the patience."""


class GatherFailed(RuntimeError):
    """A peer did not take its part in gathering a tensor. The process groups can't be used any more."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What the owning stage says of a parameter: which stage it is, and its shard's shape and dtype."""

    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class MegatronSource:
    """Weights of a GPTModel for `TrainerRank`.

    Args:
        model: a GPTModel or its virtual-pipeline chunks, bare or inside DDP and Float16Module.
        hf_config: a model directory, its config.json as a dict, or a transformers config.
        deadline_seconds: for each collective.

    Construction is a collective over the pipeline-parallel group.

    Raises:
        UnsupportedModel: the model is not what its config and family say.
    """

    def __init__(self, model: Any, hf_config: Any, *, deadline_seconds: float = GATHER_DEADLINE_SECONDS) -> None:
        config = read_config(hf_config)
        family = family_of(config)
        shape = family.shape(config)
        self._chunks = chunks_of(model)
        self._deadline = timedelta(seconds=deadline_seconds)
        self._tensor_group: Any = parallel_state.get_tensor_model_parallel_group()
        self._pipeline_group: Any = parallel_state.get_pipeline_model_parallel_group()
        self._tied = shape.tied
        self._entries = tuple(family.entries(shape))
        self._held = self._agree(_refusals(self._chunks))

    def metadata(self) -> Sequence[ParamMeta]:
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
        """Raises GatherFailed when a peer does not take part within the deadline."""
        self._gather_stale_parameters()
        local = self._local()
        device = next(iter(local.values())).device
        for entry in self._entries:
            shards = self._shards(entry, local.get(entry.megatron), device)
            for declared, tensor in zip(entry.hf, entry.rule.to_hf(shards), strict=True):
                yield declared.name, tensor.contiguous()

    def _local(self) -> dict[str, Tensor]:
        local = {name: parameter.detach() for name, parameter in named_parameters(self._chunks)}
        if self._tied:
            # The last stage's copy of a tied embedding; the first stage's is the one that is exported.
            local.pop(OUTPUT, None)
        return local

    # ---- agreement over the stages --------------------------------------------------------------

    def _agree(self, refusals: list[str]) -> dict[str, _Held]:
        """Every stage learns what each holds and refuses what any has to refuse."""
        stage = dist.get_rank(self._pipeline_group)
        mine = {name: _Held(stage, tuple(p.shape), p.dtype) for name, p in self._local().items()}
        answers: list[Any] = [None] * dist.get_world_size(self._pipeline_group)
        dist.all_gather_object(answers, (mine, refusals), group=self._pipeline_group)
        held: dict[str, _Held] = {}
        problems: list[str] = []
        for theirs, refused in answers:
            problems += refused + [f"{name} is on two stages" for name in theirs.keys() & held.keys()]
            held |= theirs
        problems += self._misfits(held)
        if problems:
            raise UnsupportedModel("; ".join(dict.fromkeys(problems)))
        return held

    def _misfits(self, held: dict[str, _Held]) -> list[str]:
        known = {entry.megatron for entry in self._entries}
        unknown = [f"{name} has no mapping" for name in held if name not in known]
        missing = [f"{name} is on no stage" for name in sorted(known - held.keys())]
        tensor_parallel = dist.get_world_size(self._tensor_group)
        wrong = [
            problem
            for entry in self._entries
            if entry.megatron in held
            for problem in mismatches(entry, held[entry.megatron].shape, tensor_parallel)
        ]
        return unknown + missing + wrong

    # ---- gathering ------------------------------------------------------------------------------

    def _gather_stale_parameters(self) -> None:
        """With overlap_param_gather, parameters are old until the next forward; exporting would ship them."""
        for chunk in self._chunks:
            ddp_config = getattr(chunk, "ddp_config", None)
            if ddp_config is not None and ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _shards(self, entry: Entry, mine: Tensor | None, device: torch.device) -> list[Tensor]:
        held = self._held[entry.megatron]
        shard = torch.empty(held.shape, dtype=held.dtype, device=device) if mine is None else mine.contiguous()
        if dist.get_world_size(self._pipeline_group) > 1:
            work = dist.broadcast(shard, group=self._pipeline_group, group_src=held.stage, async_op=True)
            self._wait(work, entry)
        size = dist.get_world_size(self._tensor_group)
        if size == 1 or not entry.rule.sharded:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(size)]
        self._wait(dist.all_gather(shards, shard, group=self._tensor_group, async_op=True), entry)
        return shards

    def _wait(self, work: Any, entry: Entry) -> None:
        try:
            work.wait(self._deadline)
        except RuntimeError as error:
            raise GatherFailed(f"{entry.megatron}: a peer did not take part in gathering it: {error}") from error


def _refusals(chunks: list[Any]) -> list[str]:
    """What can't be seen in names and shapes."""
    if any(unwrap(chunk).config.layernorm_zero_centered_gamma for chunk in chunks):
        return ["layernorm_zero_centered_gamma stores norm weights minus one; no mapping adds it back"]
    return []

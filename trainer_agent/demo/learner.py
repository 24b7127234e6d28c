"""The policy under training: a Megatron model with Megatron's DDP, optimizer and pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from trainer_agent.demo.objective import Batch, behaviour_gap, clipped_loss
from trainer_agent.megatron.build import build_from_hf
from trainer_agent.megatron.parameters import unwrap


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    learning_rate: float
    micro_batch: int = 4
    """Samples in one forward pass: bounds the memory that logits take."""
    clip: float = 0.2
    max_grad_norm: float = 1.0
    distributed_optimizer: bool = False
    """Adam's state is split over the data-parallel ranks; parameters are gathered in the next forward."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The same on every rank."""

    loss: float
    """Mean over generated tokens."""
    grad_norm: float
    behaviour_gap: float
    """Largest difference of a token's logprob between trainer and engine, before the step."""


class Learner:
    """Build with every rank at once; every method is a collective.

    Raises:
        ValueError: virtual pipeline chunks, which this training loop does not schedule.
    """

    def __init__(
        self,
        model_dir: Path | str,
        settings: LearnerSettings,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        dtype: torch.dtype | None = None,
        **overrides: Any,
    ) -> None:
        self.settings = settings
        (bare,) = build_from_hf(
            model_dir, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, dtype=dtype, **overrides
        )
        self._config: Any = bare.config
        self.model: Any = _wrapped(bare, settings)
        self.optimizer: Any = _optimizer(self.model, self._config, settings)
        self._config.finalize_model_grads_func = finalize_model_grads
        self._schedule: Any = get_forward_backward_func()

    def step(self, batch: Batch) -> StepResult:
        """One clipped policy-gradient step over the whole batch, whose rows are dealt to data-parallel ranks."""
        mine = self._my_rows(batch)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        outcomes = self._run(mine, forward_only=False)
        _, grad_norm, _ = self.optimizer.step()
        return _result(outcomes, float(grad_norm or 0.0))

    def logprobs(self, batch: Batch) -> Tensor | None:
        """[rows, length] of this rank's rows' labels; on the last pipeline stage, elsewhere None."""
        outcomes = self._run(self._my_rows(batch), forward_only=True)
        return torch.cat([o["logprobs"] for o in outcomes]) if outcomes else None

    def sharded_state(self, *, loading: bool) -> dict[str, Any]:
        """Model and optimizer for Megatron's `dist_checkpointing`."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state: dict[str, Any] = {"model": unwrap(self.model).sharded_state_dict(metadata={"dp_cp_group": group})}
        state["optimizer"] = self.optimizer.sharded_state_dict(state["model"], is_loading=loading)
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take what `dist_checkpointing.load` made of `sharded_state(loading=True)`."""
        unwrap(self.model).load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _my_rows(self, batch: Batch) -> Batch:
        size = len(batch) // parallel_state.get_data_parallel_world_size()
        first = size * parallel_state.get_data_parallel_rank()
        if size % self.settings.micro_batch or size == 0:
            raise ValueError(f"{size} rows a rank are not whole micro-batches of {self.settings.micro_batch}")
        return batch.rows(first, first + size)

    def _run(self, batch: Batch, *, forward_only: bool) -> list[dict[str, Tensor]]:
        size = self.settings.micro_batch
        parts = [batch.rows(i, i + size) for i in range(0, len(batch), size)]
        outcomes: list[dict[str, Tensor]] = self._schedule(
            forward_step_func=partial(_forward, clip=self.settings.clip),
            data_iterator=iter(parts),
            model=self.model,
            num_microbatches=len(parts),
            seq_length=batch.tokens.shape[1],
            micro_batch_size=size,
            forward_only=forward_only,
        )
        return outcomes


def _wrapped(bare: Any, settings: LearnerSettings) -> Any:
    config = bare.config
    module = Float16Module(config, bare) if config.bf16 else bare
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed_optimizer,
        overlap_grad_reduce=settings.distributed_optimizer,
        overlap_param_gather=settings.distributed_optimizer,
    )
    model = DistributedDataParallel(config=config, ddp_config=ddp_config, module=module)
    if settings.distributed_optimizer:
        config.no_sync_func = model.no_sync
    return model


def _optimizer(model: Any, config: Any, settings: LearnerSettings) -> Any:
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        weight_decay=0.0,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        clip_grad=settings.max_grad_norm,
        use_distributed_optimizer=settings.distributed_optimizer,
        overlap_param_gather=settings.distributed_optimizer,
    )
    return get_megatron_optimizer(optimizer_config, [model])


def _forward(batches: Iterator[Batch], model: Any, *, clip: float) -> tuple[Tensor, Any]:
    batch = next(batches)
    positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    return model(batch.tokens, positions, None, labels=batch.labels), partial(_loss, batch, clip)


def _loss(batch: Batch, clip: float, cross_entropy: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The schedule's loss function: (sum, number of tokens, what `step` reads)."""
    logprobs = -cross_entropy.float()
    loss, count = clipped_loss(logprobs, batch, clip), batch.mask.sum()
    seen = {
        "loss": loss.detach(),
        "tokens": count,
        "gap": behaviour_gap(logprobs.detach(), batch),
        "logprobs": logprobs.detach(),
    }
    return loss, count.to(torch.int), seen


def _result(outcomes: list[dict[str, Tensor]], grad_norm: float) -> StepResult:
    """Only the last stage saw the loss; its tensor-parallel ranks saw the same one."""
    first_of_shards = parallel_state.get_tensor_model_parallel_rank() == 0
    sums, gap = torch.zeros(2, dtype=torch.float64), torch.zeros(1)
    if outcomes:
        gap = torch.stack([o["gap"] for o in outcomes]).max().view(1)
        if first_of_shards:
            sums = torch.stack([torch.stack([o["loss"], o["tokens"]]) for o in outcomes]).double().sum(dim=0)
    dist.all_reduce(sums)
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return StepResult(loss=float(sums[0] / sums[1].clamp(min=1)), grad_norm=grad_norm, behaviour_gap=float(gap))

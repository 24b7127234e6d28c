"""What a Megatron model says, however it is split: whole logits, compared with those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.hf_models import logits_of_transformers


def logit_error(chunks: list[Any], model_dir: Path) -> float | None:
    """Largest difference to transformers' logits, on ranks of the last stage; None elsewhere. Collective."""
    from megatron.core import parallel_state

    from trainer_agent.megatron.layer_spec import context_positions

    reference = logits_of_transformers(model_dir)
    tokens, wanted = reference["tokens"], reference["logits"]
    parts, part = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    mine = context_positions(tokens.shape[1], parts)[part]
    logits = _run(chunks, tokens[:, mine], mine, tokens.shape[1])
    if logits is None:
        return None
    return float((_whole(logits)[..., : wanted.shape[-1]] - wanted[:, mine]).abs().max())


def logits_of(chunks: list[Any], tokens: Tensor) -> Tensor | None:
    """[rows, positions, padded vocabulary], on ranks of the last stage; None elsewhere. Collective."""
    logits = _run(chunks, tokens, torch.arange(tokens.shape[1]), tokens.shape[1])
    return None if logits is None else _whole(logits)


def _run(chunks: list[Any], tokens: Tensor, positions: Tensor, length: int) -> Tensor | None:
    """[rows, positions, vocabulary of this rank] from the last stage."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    count = parallel_state.get_pipeline_model_parallel_world_size()
    batches = tokens.chunk(count)
    for chunk in chunks:
        chunk.eval()
    outcomes: list[Tensor] = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=[iter([(b, positions.expand_as(b)) for b in batches]) for _ in chunks],
        model=chunks,
        num_microbatches=count,
        seq_length=length,
        micro_batch_size=batches[0].shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    return torch.cat(outcomes) if outcomes else None


def _forward(batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    tokens, positions = next(batches)
    return model(tokens, positions, None), _collect


def _collect(logits: Tensor, non_loss_data: bool = False) -> Tensor:
    return logits.detach()


def _whole(logits: Tensor) -> Tensor:
    """Each tensor-parallel rank has a part of the vocabulary."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)

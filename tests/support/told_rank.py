"""A trainer of one rank that pushes what it is told, well or badly made: one JSON line on its input for each push.

    python -m tests.support.told_rank MODEL_DIR

See `Order`. It joins for each push anew, since what a source states is fixed when it joins. Prints a JSON line for each
end: `pushed` with the number, or `failed` with the reason and the text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from controlplane.core.canary import CanaryReference
from controlplane.core.errors import WeightplaneError
from controlplane.core.pauses import PauseMode, PausePolicy
from tests.support.hf_models import checkpoint
from tests.support.tiny_rank import EMBEDDING_NAME
from tests.support.toy_rank import say
from trainer_agent.rank import TrainerRank
from trainer_agent.sources.iterable import IterableSource

SPREAD = 0.05


@dataclass(frozen=True)
class Order:
    """What to push."""

    seed: int
    """Which weights: the checkpoint's, each moved by what this seed draws."""
    only: str = ""
    """Move the tensors with this in their name alone."""
    without: Sequence[str] = ()
    """Leave these out, of what is stated and of what is yielded."""
    reference: tuple[Sequence[int], Sequence[float], float] | None = None
    """A prompt, its log probabilities, and the tolerance: what the trainer says of these weights."""
    pause: tuple[str, float, str] | None = None
    """What becomes of the engine's requests: mode, seconds to wait, fallback."""
    rows: Sequence[tuple[str, int]] = ()
    """Give these tensors so many rows: more are zeros, as padding is."""


def weights(model: Path, order: Order) -> dict[str, torch.Tensor]:
    """Whole and in the right shapes, whatever else the order says; the same in every process."""
    generator = torch.Generator().manual_seed(order.seed)
    moved = {}
    for name, tensor in sorted(checkpoint(model).items()):
        step = SPREAD * torch.randn(tensor.shape, generator=generator)
        moved[name] = tensor + step.to(tensor.dtype) if order.only in name else tensor
    return moved


def source(model: Path, order: Order) -> IterableSource:
    tensors = {name: t for name, t in weights(model, order).items() if name not in order.without}
    for name, rows in order.rows:
        tensors[name] = _with_rows(tensors[name], rows)
    return IterableSource(None, tensors.items, ties=[("lm_head.weight", EMBEDDING_NAME)])


def _with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    resized = torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype)
    kept = min(rows, len(tensor))
    resized[:kept] = tensor[:kept]
    return resized


def push(model: Path, fields: Mapping[str, Any]) -> None:
    order = Order(**fields)
    try:
        with TrainerRank.join(source=source(model, order), join_timeout=120, push_timeout=120) as rank:
            reference = None if order.reference is None else CanaryReference(*map(_plain, order.reference))
            report = rank.push(order.seed, reference=reference, pause=_pause(order))
    except WeightplaneError as error:
        say(event="failed", reason=error.reason, text=str(error))
        return
    say(event="pushed", number=report.version.number, outcomes=report.outcomes, verified=report.verified)


def _pause(order: Order) -> PausePolicy | None:
    if order.pause is None:
        return None
    mode, seconds, fallback = order.pause
    return PausePolicy(PauseMode(mode), seconds, PauseMode(fallback))


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def main() -> None:
    torch.set_num_threads(1)
    say(event="listening")
    for line in sys.stdin:
        push(Path(sys.argv[1]), json.loads(line))


if __name__ == "__main__":
    main()

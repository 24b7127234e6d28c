"""A training process without a model: joins, pushes made-up tensors, prints one JSON line for each thing that happens.

Run as `python -m tests.support.toy_rank JSON`; see `Script` for what the JSON may say.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from controlplane.core.errors import WeightplaneError
from trainer_agent.rank import TrainerRank
from trainer_agent.source import ParamMeta

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (64, 1024),
    "scalar": (),
    "layer.0": (100, 1000),
    "layer.1": (33, 7),
    "empty": (0, 8),
    "head": (3, 50_001),
}
"""About 1.2 MB: many chunks of 64 KiB, tensors larger than one, and the odd ones."""


@dataclass(frozen=True)
class Script:
    """What the process does."""

    steps: int = 1
    coordinator: str | None = None
    join_timeout: float = 90.0
    push_timeout: float = 60.0
    fork_in_push: bool = False
    """Fork a child, which outlives the push, in the middle of the first iteration."""
    init_group: bool = False
    """Initialise torch.distributed (gloo) first, as a training loop does."""
    spoil: str = ""
    """missing, extra, shape, or raise: how the source deviates from its metadata."""
    spoiled_rank: int = 0
    pause_before_step: float = 0.0
    catch: bool = True
    """Print errors and go on; else let them out."""
    differ: bool = False
    """Each rank yields other numbers."""
    layout_differs: bool = False
    agent_config: str = ""


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """The weights of a step; the same in every process."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class ToySource:
    """Yields `tensors_of(step)`."""

    def __init__(self, script: Script, rank: int) -> None:
        self.step = 0
        self._script = script
        self._rank = rank
        self.children: list[int] = []

    def metadata(self) -> Sequence[ParamMeta]:
        last = "other" if self._script.layout_differs and self._rank else "head"
        return [ParamMeta(last if name == "head" else name, torch.float32, shape) for name, shape in SHAPES.items()]

    def ties(self) -> Sequence[tuple[str, str]]:
        return [("tied", "embed")]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        spoil = self._script.spoil if self._rank == self._script.spoiled_rank else ""
        for i, (name, tensor) in enumerate(tensors_of(self.step).items()):
            if i == 2 and self._script.fork_in_push and not self.children:
                self.children.append(_forked_child())
            if spoil == "raise" and i == 3:
                raise ValueError("the source broke")
            if spoil == "missing" and name == "head":
                continue
            wrong = spoil == "shape" and i == 2
            yield name, tensor.t() if wrong else tensor + self._rank if self._script.differ else tensor
        if spoil == "extra":
            yield "more", torch.zeros(3)


def _forked_child() -> int:
    """As a data loader's worker: inherits everything, and stays."""
    pid = os.fork()
    if pid == 0:
        os.closerange(0, 3)  # else the test waits for this child's end of its parent's output
        time.sleep(30)
        os._exit(0)
    return pid


def say(**fields: Any) -> None:
    line = json.dumps({"rank": int(os.environ.get("RANK", "0")), "pid": os.getpid()} | fields)
    # One write, and a newline before it too: ranks share a pipe, and an unbuffered log line writes its end by itself.
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()


def main(source_of: Callable[[Script, int], ToySource] = ToySource) -> None:
    script = Script(**json.loads(sys.argv[1]))
    rank_number = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    if script.init_group:
        dist.init_process_group("gloo")
    source = source_of(script, rank_number)
    try:
        rank = TrainerRank.join(
            script.coordinator,
            source=source,
            join_timeout=script.join_timeout,
            push_timeout=script.push_timeout,
            agent_config=Path(script.agent_config) if script.agent_config else None,
        )
    except WeightplaneError as error:
        say(event="refused", reason=error.reason, text=str(error))
        if not script.catch:
            raise
        return
    with rank:
        say(event="joined", term=rank.term, run=rank.run_id)
        for step in range(1, script.steps + 1):
            source.step = step
            with rank.phase("train"):
                time.sleep(script.pause_before_step)
            _push(rank, step, script)
    for child in source.children:
        os.kill(child, 9)


def _push(rank: TrainerRank, step: int, script: Script) -> None:
    try:
        report = rank.push(step)
    except (WeightplaneError, ValueError) as error:
        say(event="failed", step=step, reason=getattr(error, "reason", type(error).__name__), text=str(error))
        if not script.catch or getattr(error, "reason", "") == "STALE_TERM":
            raise
        return
    say(
        event="pushed",
        step=step,
        version=report.version.number,
        status=report.status,
        outcomes=report.outcomes,
        seconds=round(report.seconds, 3),
    )


if __name__ == "__main__":
    main()

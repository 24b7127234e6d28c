"""What updates cost the rollouts of an asynchronous loop: tokens per second with them and without.

The loop of examples/async_grpo.py in small: SmolLM2-135M learns (AdamW on float32 weights, by transformers, 4 passages
of 128 tokens, three times a step) while one real vLLM engine answers requests all the time; after each step its weights
are pushed with `push_async`, and training goes on while the engine installs. Windows with pushes and windows without
come in turn, with equal steps in them. The engine has one core, and all else, learner and agents, the other: an engine
and a trainer have devices of their own, and neither computes less because the other does.

The pause is the engine's own account of how long it stood still, canary included. The canary's first pass is also the
one in which the prefixes of the requests that were kept are computed anew, under the new weights: in the pause or after
it, that work is the same. The export is the trainer's time in `push_async`. Shares are of the windows with pushes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.delta import loss_of, passages
from bench.harness import Row, spread
from bench.push import PARTS
from bench.real.fleet import RUN, RealFleet, quiet, real_fleet
from bench.real.rollouts import Rollouts
from bench.real.skipped import not_quick
from bench.real.weights import TIES, model_directory
from trainer_agent.rank import TrainerRank
from trainer_agent.rank.pending import PendingPush
from trainer_agent.source import ParamMeta
from trainer_agent.sources.iterable import IterableSource

DEADLINE_SECONDS = 420
STEPS, ROUNDS = 2, 3
PASSES = 3
"""Over the passages, in a step: it takes as long as one of the example's (17 s on two cores)."""
CONCURRENT = 8
RATE = 1e-6
GOAL = 0.05


@dataclass
class Window:
    """Some steps of learning."""

    seconds: float
    tokens: int
    exported: float = 0.0
    parts: list[dict[str, float]] = field(default_factory=list)
    """Of each pause, in seconds."""

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def paused(self) -> float:
        return sum(sum(parts.values()) for parts in self.parts)


class Learner:
    """A model that learns, and the weights that it has now."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._tokens = passages(model)

    def learn(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for _ in range(PASSES):
            torch.autograd.backward(loss_of(self._network, self._tokens) / PASSES)
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._optimizer.step()

    def source(self) -> IterableSource:
        meta = [ParamMeta(n, torch.bfloat16, tuple(p.shape)) for n, p in self._network.named_parameters()]
        return IterableSource(meta, self._weights, ties=TIES)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, p.detach().to(torch.bfloat16)) for name, p in self._network.named_parameters())


class Loop:
    def __init__(self, fleet: RealFleet, rank: TrainerRank, learner: Learner, rollouts: Rollouts) -> None:
        self._fleet, self._rank, self._learner, self._rollouts = fleet, rank, learner, rollouts
        self._step = 0

    def window(self, steps: int, *, pushes: bool) -> Window:
        """Ends when the last push is decided."""
        began, before = time.perf_counter(), self._rollouts.tokens()
        found, pending = Window(0.0, 0), None
        for _ in range(steps):
            self._learner.learn()
            if pushes:
                found.parts += self._parts(pending)
                self._step += 1
                started = time.perf_counter()
                pending = self._rank.push_async(self._step)
                found.exported += time.perf_counter() - started
        found.parts += self._parts(pending)
        found.seconds, found.tokens = time.perf_counter() - began, self._rollouts.tokens() - before
        return found

    def _parts(self, pending: PendingPush | None) -> list[dict[str, float]]:
        """What its update took of the engine."""
        if pending is None:
            return []
        pending.applied()
        (status,) = self._fleet.statuses().values()
        return [{part: getattr(status.update.timings, part).ToNanoseconds() / 1e9 for part in PARTS}]


def measure(quick: bool) -> list[Row]:
    if quick:
        return not_quick("tokens per second", engines=1)
    quiet()
    model = model_directory()
    with ExitStack() as stack:
        trains, serves = sorted(os.sched_getaffinity(0))[:2]
        fleet = stack.enter_context(real_fleet(model, cores=[str(serves)], vllm={"max_num_seqs": CONCURRENT}))
        os.sched_setaffinity(0, {trains})
        learner = Learner(model)
        rank = stack.enter_context(TrainerRank.join(fleet.address, source=learner.source(), run_id=RUN))
        rank.push(0, wait="serving")
        loop = Loop(fleet, rank, learner, stack.enter_context(Rollouts(fleet.address, CONCURRENT)))
        loop.window(1, pushes=True)  # warms up
        windows: list[tuple[Window, Window]] = []
        for index in range(ROUNDS):
            first = loop.window(STEPS, pushes=index % 2 == 0)
            second = loop.window(STEPS, pushes=index % 2 == 1)
            windows.append((first, second) if index % 2 == 0 else (second, first))
    return rows([with_pushes for with_pushes, _ in windows], [without for _, without in windows])


def rows(on: list[Window], off: list[Window]) -> list[Row]:
    ratio = spread([a.speed / b.speed for a, b in zip(on, off, strict=True)]).median
    pause, export = _share(on, lambda w: w.paused), _share(on, lambda w: w.exported)
    each = [parts for window in on for parts in window.parts]
    shown = ", ".join(f"{part} {statistics.median(p[part] for p in each) * 1000:.0f} ms" for part in PARTS)
    speeds = {"ours": [w.speed for w in on], "other": [w.speed for w in off]}
    step = spread([w.seconds for w in off]).median
    return [
        Row(
            name="tokens per second",
            what=f"{CONCURRENT} requests at once beside training, with a push after each step; other: none",
            ours=spread(speeds["ours"]).median,
            other=spread(speeds["other"]).median,
            unit="tokens/s",
            ratio=ratio,
            goal="",
            met=None,
            note="the engine has one core, learner and agents the other; a pause, in the median: " + shown,
            samples=speeds,
        ),
        _share_row("pause", "of the time that the engine stood still for updates, canary included", pause, step, GOAL),
        _share_row("export", "of the time that the trainer spent in `push_async`", export, step, None),
    ]


def _share(windows: list[Window], seconds: Callable[[Window], float]) -> list[float]:
    return [seconds(window) / window.seconds for window in windows]


def _share_row(name: str, what: str, shares: list[float], window: float, goal: float | None) -> Row:
    share = spread(shares).median
    return Row(
        name=f"{name} share",
        what=f"share {what}",
        ours=100 * share,
        other=None,
        unit="%",
        ratio=None,
        goal="" if goal is None else f"<= {100 * goal:g} %",
        met=None if goal is None else share <= goal,
        note=f"windows of {window:.0f} s",
        samples={"ours": [100 * s for s in shares]},
    )

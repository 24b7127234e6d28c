"""The push of bench/push.py to two real vLLM engines at once, against the same push to one.

Each engine has one core of its own in both runs (`taskset`), on which its agent runs too; the trainer's processes run
on any. The fleets are there at the same time, and pushes go to one and the other in turn: the clock runs until the
trainer is told that all engines applied the version, canary included.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

from bench.harness import Row, Timed, interleave
from bench.real.fleet import RUN, quiet, real_fleet
from bench.real.pusher import Pusher
from bench.real.skipped import not_quick
from bench.real.weights import model_directory

DEADLINE_SECONDS = 300
ROUNDS = 9
GOAL = 1.5


def measure(quick: bool) -> list[Row]:
    if quick:
        return not_quick("two engines", engines=3)
    quiet()
    model = model_directory()
    first, second = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    with ExitStack() as stack:
        one = _pusher(stack, model, [first])
        two = _pusher(stack, model, [first, second])
        samples = interleave({"one": one.push, "two": two.push}, rounds=ROUNDS, warm_up=2)
    what = "from the call until all applied, canary included; other: one engine, pinned alike"
    note = "three engines and two trainers on the machine; those that wait do nothing"
    return [Timed("two engines", what, samples["two"], samples["one"], note).not_slower(GOAL)]


def _pusher(stack: ExitStack, model: Path, cores: list[str]) -> Pusher:
    fleet = stack.enter_context(real_fleet(model, cores=cores))
    pusher = stack.enter_context(Pusher(fleet.address, RUN))
    time.sleep(1.0)
    return pusher

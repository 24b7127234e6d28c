"""What a delta saves: pushes of real learning steps over inline, whole and as what changed. See bench/delta.py."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.delta import fleet, measure_rate
from bench.harness import Row
from bench.real.fleet import quiet
from bench.real.skipped import not_quick
from bench.real.weights import model_directory

DEADLINE_SECONDS = 360
STEPS = WARM_UP = 3
RATES = (1e-6, 1e-5)


def measure(quick: bool) -> list[Row]:
    if quick:
        return not_quick("deltas", engines=1)
    quiet()
    model, found = model_directory(), []
    with tempfile.TemporaryDirectory() as directory, fleet(model, Path(directory)) as address:
        for rate in RATES:
            told = measure_rate(address, model, rate, steps=STEPS, warm_up=WARM_UP)
            found += [_bytes(told), _seconds(told)]
    return found


def _bytes(told: dict[str, Any]) -> Row:
    delta, whole = told["delta_bytes"] / 1e6, told["whole_bytes"] / 1e6
    return _row(told, "bytes", "that the engine's agent received, as deltas; other: whole", delta, whole, "MB", "")


def _seconds(told: dict[str, Any]) -> Row:
    same = "the same tokens and log probabilities" if told["same_tokens_and_logprobs"] else "**other tokens**"
    what = "from the call to the decision, on one host, where the way costs nearly nothing; other: whole"
    return _row(told, "seconds", what, told["delta_seconds"], told["whole_seconds"], "s", f"{same} after each step")


def _row(told: dict[str, Any], name: str, what: str, ours: float, other: float, unit: str, note: str) -> Row:
    return Row(
        name=f"{name}, learning rate {told['learning_rate']:g}: {told['elements_changed_percent']} % changed",
        what=what,
        ours=ours,
        other=other,
        unit=unit,
        ratio=ours / other,
        goal="",
        met=None,
        note=note,
    )

"""One push of SmolLM2-135M in bfloat16 (269 MB, 272 tensors) to one real vLLM engine over shared memory.

A coordinator, an engine agent, a trainer agent and this rank, world 1, each a process. In each round, in turn: a push;
the bare load, which is vLLM's layerwise reload of the same tensors and the packing of the tied head, in the same engine
process with nothing around it (the limit of what any transport can reach there); a copy of the bytes; and the ways over
the disk: safetensors, and vLLM's own `reload_weights` in the same engine, which neither stops its requests, nor clears
its caches, nor compares a byte, nor packs the tied head. A push does all of that, and its clock runs from the call in
the trainer, whose weights lie in its own memory, until the trainer is told that the engine takes requests under the new
version. The pause is the engine's own account.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file

from bench.harness import Row, interleave, paired_ratio, spread
from bench.real.fleet import RUN, RealFleet, quiet, real_fleet
from bench.real.weights import Turning, model_directory, two_versions
from trainer_agent.rank import TrainerRank

DEADLINE_SECONDS = 300
QUICK_DEADLINE_SECONDS = 150
PARTS = ("quiesce", "install", "caches", "canary")


@dataclass
class Pushes:
    """What every measured push found, in seconds; in the order of the rounds, the warm-up's first."""

    rank: TrainerRank
    fleet: RealFleet
    weights: Turning
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    taken: list[float] = field(default_factory=list)

    def push(self) -> float:
        self.weights.turn()
        started = time.perf_counter()
        self.rank.push(len(self.taken), wait="serving")
        self.taken.append(time.perf_counter() - started)
        statuses = self.fleet.statuses().values()
        for part, seconds in self.parts.items():
            seconds.append(max(getattr(s.update.timings, part).ToNanoseconds() for s in statuses) / 1e9)
        return self.taken[-1]

    def without_canary(self) -> list[float]:
        return [total - canary for total, canary in zip(self.taken, self.parts["canary"], strict=True)]

    def pauses(self) -> list[float]:
        """Without the canary."""
        return [sum(parts) for parts in zip(*(self.parts[p] for p in PARTS[:3]), strict=True)]


def measure(quick: bool) -> list[Row]:
    quiet()
    model, rounds = model_directory(), 3 if quick else 11
    versions = two_versions(model)
    weights = Turning(versions)
    with ExitStack() as stack:
        fleet = stack.enter_context(real_fleet(model))
        rank = stack.enter_context(TrainerRank.join(fleet.address, source=weights.source(), run_id=RUN))
        pushes = Pushes(rank, fleet, weights)
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightplane-bench-", dir=Path.home())))
        samples = interleave(contenders(fleet, pushes, Turning(versions), model, disk), rounds=rounds, warm_up=2)
    return rows(samples, pushes, rounds)


def contenders(
    fleet: RealFleet, pushes: Pushes, weights: Turning, model: Path, disk: Path
) -> dict[str, Callable[[], float]]:
    """`weights`: of the disk's own turns; a push always brings what the push before it did not."""
    engine, file = fleet.engines[0], disk / "model.safetensors"
    for name in ("config.json", "generation_config.json"):
        (disk / name).write_bytes((model / name).read_bytes())
    save_file(weights.current, file)
    engine.ask("bench_take", str(file))

    def over_disk(*, synced: bool) -> float:
        weights.turn()
        started = time.perf_counter()
        save_file(weights.current, file)
        if synced:
            _sync(file)
        engine.ask("bench_reload", str(disk))
        return time.perf_counter() - started

    return {
        "push": pushes.push,
        "bare": lambda: float(engine.ask("bench_bare_load")["all"]),
        "copy": lambda: float(engine.ask("bench_copy")),
        "disk": lambda: over_disk(synced=False),
        "disk, fsync": lambda: over_disk(synced=True),
    }


def _sync(file: Path) -> None:
    """As a checkpoint that has to survive the host is written."""
    for path in (file, file.parent):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def rows(samples: dict[str, list[float]], pushes: Pushes, rounds: int) -> list[Row]:
    push, bare = samples["push"], samples["bare"]
    spoken, without, pause = push, pushes.without_canary()[-rounds:], pushes.pauses()[-rounds:]
    parts = {part: statistics.median(pushes.parts[part][-rounds:]) * 1000 for part in PARTS}
    shown = ", ".join(f"{part} {ms:.0f} ms" for part, ms in parts.items())
    copied = f"a copy of the bytes: {statistics.median(samples['copy']) * 1000:.0f} ms"
    whole = "from the call to an open gate"
    return [
        _row("pause", "without the canary; other: vLLM's bare load of the same", pause, bare, 1.20, shown),
        _row("total without canary", f"{whole}; other: the bare load", without, bare, 1.35, copied),
        _row("total", f"{whole}, canary included; other: the bare load", spoken, bare, 1.70, ""),
        _faster("disk", f"{whole}; other: safetensors, page cache warm, reload_weights", push, samples["disk"], 1.5),
        _faster("disk, fsync", "the same, with the file synced", push, samples["disk, fsync"], 1.5),
    ]


def _row(name: str, what: str, ours: list[float], bare: list[float], goal: float, note: str) -> Row:
    ratio = paired_ratio(ours, bare)
    return Row(
        name=name,
        what=what,
        ours=spread(ours).median,
        other=spread(bare).median,
        unit="s",
        ratio=ratio,
        goal=f"ours / other <= {goal:g}",
        met=ratio <= goal,
        note=note,
        samples={"ours": ours, "other": bare},
    )


def _faster(name: str, what: str, ours: list[float], other: list[float], goal: float) -> Row:
    ratio = paired_ratio(other, ours)
    return Row(
        name=name,
        what=what,
        ours=spread(ours).median,
        other=spread(other).median,
        unit="s",
        ratio=ratio,
        goal=f"other / ours >= {goal:g}",
        met=ratio >= goal,
        note="the total, canary and checksums included, against a way without them",
        samples={"ours": ours, "other": other},
    )

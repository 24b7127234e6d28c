"""One push of SmolLM2-135M in bfloat16 (269 MB, 272 tensors) to one real vLLM engine over shared memory.

A coordinator, an engine agent, a trainer agent and this rank, world 1, each a process. In each round, in turn: a push;
the bare load, which is vLLM's layerwise reload of the same tensors and the packing of the tied head, in the same engine
process with nothing around it (each matrix is loaded, then packed; an install packs beside the load, and may be
faster); the rank's export alone; a copy of the bytes; and the ways over the disk: safetensors, and vLLM's own
`reload_weights` in the same engine, which neither stops its requests, nor clears its caches, nor compares a byte, nor
packs the tied head. A push does all of that, and its clock runs from the call in the trainer, whose weights lie in its
own memory, until the trainer is told that the engine takes requests under the new version. The pause is the engine's
own account.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file

from bench.harness import Row, Timed, interleave
from bench.real.fleet import RUN, RealFleet, quiet, real_fleet
from bench.real.weights import Turning, model_directory, two_versions
from trainer_agent.chunking import plan_segment
from trainer_agent.rank import TrainerRank
from trainer_agent.rank.exporter import Exporter, layout_of
from trainer_agent.rank.memory import WholeMemory

DEADLINE_SECONDS = 300
QUICK_DEADLINE_SECONDS = 150
PARTS = ("quiesce", "install", "caches", "canary")
SPOKEN = "the total, canary and checksums included, against a way without them"
SUMMED = "checksums included, against a way without them"


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

    exported = Export(weights)
    return {
        "push": pushes.push,
        "export": exported.once,
        "bare": lambda: float(engine.ask("bench_bare_load")["all"]),
        "copy": lambda: float(engine.ask("bench_copy")),
        "disk": lambda: over_disk(synced=False),
        "disk, fsync": lambda: over_disk(synced=True),
    }


class Export:
    """What a rank does of a push before its last chunk is announced: copy and sum, into memory as large."""

    def __init__(self, weights: Turning) -> None:
        self._source = weights.source()
        self._layout = layout_of(self._source)
        self._plan = plan_segment(self._layout)
        self._memory = memoryview(mmap.mmap(-1, self._plan.byte_count, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))

    def once(self) -> float:
        started = time.perf_counter()
        exporter = Exporter(self._layout, self._plan, WholeMemory(self._plan, self._memory))
        deque(exporter.chunks(iter(self._source)), maxlen=0)
        return time.perf_counter() - started


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
    whole, files = "from the call to an open gate", "other: safetensors, page cache warm, reload_weights"
    disk, synced = samples["disk"], samples["disk, fsync"]
    export = statistics.median(samples["export"]) * 1000
    rest = statistics.median(without) * 1000 - sum(parts[part] for part in PARTS[:3]) - export
    floor = f"export alone {export:.0f} ms, pause and canary as above, messages and durable writes {rest:.0f} ms"
    return [
        Timed("pause", "without the canary; other: vLLM's bare load of the same", pause, bare, shown).not_slower(1.2),
        Timed("total without canary", f"{whole}; other: the bare load", without, bare, copied).not_slower(1.35),
        Timed("total", f"{whole}, canary included; other: the bare load", spoken, bare, floor).not_slower(1.7),
        Timed("disk", f"{whole}; {files}", push, disk, SPOKEN).quicker(1.5),
        Timed("disk, fsync", "the same, with the file synced", push, synced, SPOKEN).quicker(1.5),
        Timed("disk, neither with a canary", f"{whole}; other: as disk", without, disk, SUMMED).quicker(1.5),
    ]

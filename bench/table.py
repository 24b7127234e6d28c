"""The table between the markers of docs/benchmarks.md: one line for each row, which says when it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness import Row, spread

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
HEAD = (
    "| row | ours | other | ratio | goal | met | what, and from when to when | note | measured |",
    "|---|---|---|---|---|---|---|---|---|",
)


def lines_of(file: str, where: Mapping[str, Any], rows: Sequence[Row], why: str = "") -> list[str]:
    """A file's lines; a file that failed has one that says so."""
    measured = f"{str(where['at'])[:10]}, {where['commit']}, load {where['load_1m']}"
    if why:
        return [_line([_title(file), "", "", "", "", "**failed**", "", why, measured])]
    return [_line([*_cells(file, row), measured]) for row in rows]


def _cells(file: str, row: Row) -> list[str]:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    met = {True: "yes", False: "**no**", None: ""}[row.met]
    ours, other = figure(row.ours, row.unit), figure(row.other, row.unit)
    return [f"{_title(file)} {row.name}", ours + _range(row), other, ratio, row.goal, met, row.what, row.note]


def _range(row: Row) -> str:
    values = row.samples.get("ours", ())
    if len(values) < 2:
        return ""
    found = spread(values)
    return f" ({found.low:.3g}–{found.high:.3g})"


def figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def _title(file: str) -> str:
    return f"`{file}`"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def in_docs(text: str, new: Mapping[str, list[str]]) -> str:
    """The page with these files' lines replaced, and the lines of all others as they were."""
    before, rest = text.split(BEGIN, 1)
    old, after = rest.split(END, 1)
    kept: dict[str, list[str]] = {}
    for line in old.splitlines():
        if line.startswith("| `"):
            kept.setdefault(line.split("`")[1], []).append(line)
    every = kept | dict(new)
    table = [*HEAD, *(line for file in sorted(every) for line in every[file])]
    return "\n".join([before + BEGIN, *table, END]) + after

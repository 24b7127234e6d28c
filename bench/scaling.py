"""The tables of docs/scaling.md: arithmetic from what was measured here and from what is stated, on no machine at all.

    python -m bench.scaling [--write docs/scaling.md]

What this machine measured is taken from `build/bench/*.json` where a run left it there, and else from DEFAULTS, which
name their source. Pure but for reading those files; `tests/unit/test_scaling.py` has the arithmetic by hand.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

GB, TB = 1e9, 1e12
RESULTS = Path(__file__).resolve().parents[1] / "build" / "bench"
SMOLLM2_BYTES = 269_030_016
GPUS_OF_A_NODE = 8
BEGIN, END = "<!-- computed by bench/scaling.py -->", "<!-- end of what is computed -->"


@dataclass(frozen=True, slots=True)
class Constants:
    """What was measured, in bytes a second and CPU seconds."""

    inline_rate: float = 0.44 * GB
    """One inline stream, from a rank's tensors to checked bytes at an engine's agent."""
    link_rate: float = 1.3 * GB
    """One gloo link over loopback."""
    shared_rate: float = 1.7 * GB
    """By shared memory: one copy and two checksums."""
    report_seconds: float = 0.0002
    """Of the coordinator's CPU, for one report of one agent. Unless it was measured: the goal's own limit, 20 % of a
    core for 1,000 reports a second."""
    reports_per_update: int = 4
    """Of one engine in one update, beside the regular ones: receiving, ready, installing, applied."""


DEFAULTS = Constants()
"""Of two busy cores, where no run left better ones."""


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    parameters: float
    parameter_bytes: int
    tensors: int

    @property
    def byte_count(self) -> float:
        return self.parameters * self.parameter_bytes


@dataclass(frozen=True, slots=True)
class Fleet:
    engines: int
    ranks: int
    shards: int
    """Over how many ranks one copy of the weights is split (TP x PP x EP)."""
    nic_rate: float
    """Of one GPU, one way."""
    engine_gpus: int = 8


MODELS = (
    Model("0.5B, bf16", 0.5e9, 2, 290),
    Model("8B, bf16", 8e9, 2, 291),
    Model("70B, bf16", 70e9, 2, 723),
    Model("235B, fp8", 235e9, 1, 36_945),
    Model("1T, fp8", 1e12, 1, 140_000),
    Model("1T, bf16", 1e12, 2, 70_000),
)
FLEETS = (
    Fleet(engines=16, ranks=256, shards=64, nic_rate=50 * GB),
    Fleet(engines=1_000, ranks=256, shards=64, nic_rate=50 * GB),
    Fleet(engines=1_000, ranks=4_096, shards=256, nic_rate=50 * GB),
)
SESSIONS = (16, 256, 1_000, 4_000, 10_000)
HEARTBEAT_HZ = 1.0


# ---- arithmetic ---------------------------------------------------------------------------------


def engines_of_a_leader(fleet: Fleet) -> int:
    """The planner deals engines to the least loaded rank; one rank sends one engine's whole version."""
    return math.ceil(fleet.engines / fleet.ranks)


def gather_seconds(model: Model, fleet: Fleet) -> float:
    """Every rank yields every tensor whole: what it has not, it receives."""
    return model.byte_count * (1 - 1 / fleet.shards) / fleet.nic_rate


def inline_seconds(model: Model, fleet: Fleet, constants: Constants) -> float:
    """All streams of a node's ranks go through its one trainer agent: as if one after the other."""
    streams = math.ceil(fleet.engines * GPUS_OF_A_NODE / fleet.ranks)
    return model.byte_count * streams / min(constants.inline_rate, fleet.nic_rate)


def gloo_seconds(model: Model, fleet: Fleet, constants: Constants) -> float:
    """gloo broadcasts by a binomial tree: the root sends one copy for each of its levels."""
    levels = math.ceil(math.log2(1 + engines_of_a_leader(fleet)))
    return model.byte_count * levels / min(constants.link_rate, fleet.nic_rate)


def line_seconds(model: Model, fleet: Fleet) -> float:
    """At the NIC's rate, pipelined over a chain or tree: what NCCL's broadcast comes near to."""
    return model.byte_count / fleet.nic_rate


def sharded_seconds(model: Model, fleet: Fleet) -> float:
    """If each rank sent only what it has, straight to who needs it (not built): all engines' bytes leave through all
    ranks' NICs, and come in through all of an engine's."""
    out = model.byte_count * fleet.engines / (fleet.ranks * fleet.nic_rate)
    return max(out, model.byte_count / (fleet.engine_gpus * fleet.nic_rate))


def relay_seconds(byte_count: float, engines: int, width: int, rate: float, chunk_bytes: float) -> float:
    """If engines handed chunks on to `width` others each (not built): each sends `width` copies, and a chunk is late by
    one level's time a level."""
    levels = math.ceil(math.log(max(engines, 1) * (width - 1) + 1, width)) if width > 1 else engines
    return width * byte_count / rate + max(levels - 1, 0) * width * chunk_bytes / rate


def coordinator_share(engines: int, constants: Constants) -> float:
    """Of a core, for regular reports alone."""
    return engines * HEARTBEAT_HZ * constants.report_seconds


def update_seconds(engines: int, constants: Constants) -> float:
    """The coordinator's CPU for one update: every engine's reports, whoever sends the bytes."""
    return engines * constants.reports_per_update * constants.report_seconds


def layout_bytes(model: Model) -> float:
    """Names, shapes and targets; sent once in an engine's life, in parts of at most 1 MiB."""
    return model.tensors * 90.0


# ---- tables -------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *(_line(row) for row in rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def transfers(fleet: Fleet, constants: Constants) -> list[str]:
    """Seconds until every engine has all bytes, by way."""
    head = ["model", "bytes", "gather at each rank", "inline", "gloo link", "at the NIC's rate", "sharded, all NICs"]
    rows = [
        [
            model.name,
            amount(model.byte_count),
            seconds(gather_seconds(model, fleet)),
            seconds(inline_seconds(model, fleet, constants)),
            seconds(gloo_seconds(model, fleet, constants)),
            seconds(line_seconds(model, fleet)),
            seconds(sharded_seconds(model, fleet)),
        ]
        for model in MODELS
    ]
    each = engines_of_a_leader(fleet)
    nics = f"NICs of {amount(fleet.nic_rate)}/s"
    title = f"{fleet.engines:,} engines, {fleet.ranks:,} ranks ({each} to a leader at most), {nics}:"
    return [title, "", *table(head, rows)]


def colocated(constants: Constants) -> list[str]:
    """Shared memory, one host: what each rank of a slot writes, and the layout."""
    head = ["model", "export by shared memory, one rank", "layout, once in a life", "its parts"]
    rows = [
        [
            m.name,
            seconds(m.byte_count / constants.shared_rate),
            amount(layout_bytes(m)),
            str(math.ceil(layout_bytes(m) / (1 << 20))),
        ]
        for m in MODELS
    ]
    return table(head, rows)


def sessions(constants: Constants) -> list[str]:
    """The coordinator's load."""
    head = ["engines", "reports a second", "share of a core", "CPU for one update"]
    rows = [
        [
            f"{n:,}",
            f"{n * HEARTBEAT_HZ:,.0f}",
            f"{coordinator_share(n, constants):.1%}",
            seconds(update_seconds(n, constants)),
        ]
        for n in SESSIONS
    ]
    return table(head, rows)


def relays(model: Model, fleet: Fleet) -> list[str]:
    """A fan-out tree over engines, at the NIC's rate."""
    head = ["each hands on to", "1,000 engines have it after"]
    rows = [
        [str(w), seconds(relay_seconds(model.byte_count, fleet.engines, w, fleet.nic_rate, 64 << 20))]
        for w in (1, 2, 4, 8)
    ]
    return [f"{model.name}, chunks of 64 MiB:", "", *table(head, rows)]


def amount(byte_count: float) -> str:
    for unit, name in ((TB, "TB"), (GB, "GB"), (1e6, "MB")):
        if byte_count >= unit:
            return f"{byte_count / unit:.3g} {name}"
    return f"{byte_count / 1e3:.3g} kB"


def seconds(value: float) -> str:
    if value >= 120:
        return f"{value / 60:,.0f} min"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def page(constants: Constants) -> list[str]:
    """All tables, under their titles."""
    lines = [
        f"Put in: inline {amount(constants.inline_rate)}/s, a gloo link {amount(constants.link_rate)}/s,",
        f"shared memory {amount(constants.shared_rate)}/s,",
        f"a report {constants.report_seconds * 1e6:.0f} µs of the coordinator's CPU.",
        "",
    ]
    for fleet in FLEETS:
        lines += transfers(fleet, constants)
    lines += ["Colocated, and the layout:", "", *colocated(constants)]
    lines += ["The coordinator, agents reporting once a second:", "", *sessions(constants)]
    return lines + relays(MODELS[4], FLEETS[1])


# ---- what was measured --------------------------------------------------------------------------


def constants_of(rows: Mapping[str, Mapping[str, Any]]) -> Constants:
    """`rows`: of the benchmark's results, by name. What is not among them stays at its default."""
    return replace(
        DEFAULTS,
        inline_rate=_rate(rows.get("inline stream")) or DEFAULTS.inline_rate,
        link_rate=_rate(rows.get("broadcast link")) or DEFAULTS.link_rate,
        shared_rate=_rate(rows.get("shared_memory push")) or DEFAULTS.shared_rate,
    )


def _rate(row: Mapping[str, Any] | None) -> float | None:
    return SMOLLM2_BYTES / row["ours"] if row and row["ours"] else None


def measured(directory: Path = RESULTS) -> dict[str, Mapping[str, Any]]:
    """The rows of the runs whose results lie there."""
    files = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    return {row["name"]: row for file in files for row in file.get("rows", [])}


def written(text: str, lines: Sequence[str]) -> str:
    """The document with its computed part anew. Raises ValueError: it has no such part."""
    head, _, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise ValueError(f"there is no {BEGIN} … {END}")
    return "\n".join([head + BEGIN, "", *lines]) + END + tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="the document whose tables are computed anew")
    parser.add_argument("--report-microseconds", type=float, help="of the coordinator's CPU, for one agent's report")
    given = parser.parse_args()
    constants = constants_of(measured())
    if given.report_microseconds is not None:
        constants = replace(constants, report_seconds=given.report_microseconds / 1e6)
    lines = page(constants)
    if given.write is None:
        print("\n".join(lines))
    else:
        given.write.write_text(written(given.write.read_text(), lines))


if __name__ == "__main__":
    main()

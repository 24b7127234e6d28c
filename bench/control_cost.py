"""What the control plane itself costs: pushes of 4 KB to N engines, against HTTP and Ray fan-outs that do the same.

Ours is the product: a rank's `push`, its trainer agent (a process), the coordinator (a process, its ledger on disk) and
engine agents with in-memory engines over real gRPC, up to 256 of them in a process. The clock runs from `push` until it
returns: the fleet has decided. The HTTP engines (aiohttp) are as many in as many processes; their driver, and Ray's, is
this process; the clock runs from the first call until every engine said its version. "bare" is no opponent but the
floor: as many messages over grpc.aio, with nothing behind them. All have the same 4,060 bytes, fresh in each round, and
take turns. CPU time is that of all processes together, for one push; PSS is of the coordinator
and of the processes with engines, each at its end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from bench import bare_grpc, http_engines, ray_engines
from bench.engine_host import RUN, SHAPES
from bench.fleets import fleet, hosts
from bench.harness import Row, interleave, spread
from bench.processes import Processes, cpu_seconds, processes, pss_bytes
from trainer_agent.rank import TrainerRank
from trainer_agent.source import ParamMeta
from trainer_agent.sources.iterable import IterableSource

DEADLINE_SECONDS = 900
QUICK_DEADLINE_SECONDS = 100
SIZES = (1, 4, 16, 64, 256, 1024)
QUICK_SIZES = (1, 8)
RAY_SIZES = (1, 4, 16, 64)
"""An actor is a process of 50 MB and a second of CPU at its start."""
QUICK_RAY_SIZES = (1,)
PUSHES = 4096
"""So many engine updates are measured at each N, within the rounds below."""
MIN_ROUNDS, MAX_ROUNDS = 7, 200
GOAL_ONE_MS = 10.0
LINEAR_TOLERANCE = 1.15
"""Growth per engine over the smaller fleet's, beyond which it is more than linear."""
JOIN_SECONDS = 120.0


@dataclass
class Contender:
    """One way to update N engines."""

    push: Callable[[], None]
    pids: Callable[[], list[int]]
    """Beside this process: what works for it."""
    settle: Callable[[], None] = lambda: None
    """Before the clock: the push before is really over."""
    cpu: float = 0.0
    """Seconds in all its pushes."""
    pushes: int = 0

    def __call__(self) -> float:
        self.settle()
        others, own, began = cpu_seconds(self.pids()), time.process_time(), time.perf_counter()
        self.push()
        taken, own = time.perf_counter() - began, time.process_time() - own
        self.cpu += cpu_seconds(self.pids()) - others + own
        self.pushes += 1
        return taken * 1000


class Payload:
    """Other bytes in each round."""

    def __init__(self) -> None:
        self.tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.version = 0

    def renew(self) -> None:
        self.version += 1
        for tensor in self.tensors.values():
            tensor.fill_(self.version)

    @property
    def data(self) -> bytes:
        return b"".join(t.numpy().tobytes() for t in self.tensors.values())

    @property
    def source(self) -> IterableSource:
        meta = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]
        return IterableSource(meta, lambda: iter(self.tensors.items()))


def measure(quick: bool) -> list[Row]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)
    with ExitStack() as stack:
        ray_engines.start()
        stack.callback(ray_engines.stop)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        rays = QUICK_RAY_SIZES if quick else RAY_SIZES
        sizes = QUICK_SIZES if quick else SIZES
        rows, smaller = [], None
        for engines in sizes:
            try:
                of = _of_size(directory, engines, with_ray=engines in rays, quick=quick)
            except RuntimeError as error:  # what the smaller fleets showed is told all the same
                rows.append(_failed(engines, error))
                continue
            rows += _rows(of, smaller)
            smaller = of
    return rows


@dataclass(frozen=True)
class Measured:
    """At one N: milliseconds by contender, and costs."""

    engines: int
    taken: dict[str, list[float]]
    cpu_ms: dict[str, float]
    pss_mib: dict[str, float]


def _of_size(directory: Path, engines: int, *, with_ray: bool, quick: bool) -> Measured:
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, PUSHES // engines)) if not quick else MIN_ROUNDS
    with ExitStack() as stack:
        contenders = {
            "ours": stack.enter_context(_ours(directory / f"ours-{engines}", engines)),
            "http": stack.enter_context(_http(directory / f"http-{engines}", engines)),
            "bare": stack.enter_context(_bare(directory / f"bare-{engines}", engines)),
        }
        if with_ray:
            contenders["ray"] = stack.enter_context(_ray(engines))
        # `interleave` believes what a contender returns: milliseconds here.
        taken = interleave(contenders, rounds=rounds, warm_up=3)
        cpu = {name: 1000 * c.cpu / c.pushes for name, c in contenders.items()}
        pss = {name: pss_bytes(c.pids()) / 2**20 for name, c in contenders.items()}
    return Measured(engines, taken, cpu, pss)


# ---- contenders ---------------------------------------------------------------------------------


@contextmanager
def _ours(directory: Path, engines: int) -> Iterator[Contender]:
    payload = Payload()
    with fleet(directory, engines) as found:
        known = {os.getpid(), *_children()}
        with TrainerRank.join(found.address, source=payload.source, run_id=RUN, join_timeout=JOIN_SECONDS) as rank:
            agents = [pid for pid in _children() if pid not in known]

            def push() -> None:
                payload.renew()
                report = rank.push(payload.version)
                applied = list(report.outcomes.values()).count("APPLIED")
                if applied != engines:
                    raise RuntimeError(f"{report.status}, and {applied} of {engines} engines applied it")

            def settle() -> None:
                """Engines whose gates are not open yet again would not be waited for."""
                if payload.version:
                    found.processes.wait(lambda: all(e.routable for e in found.view().engines), "open gates")

            yield Contender(push, lambda: [found.coordinator, *found.hosts, *agents], settle)


@contextmanager
def _http(directory: Path, engines: int) -> Iterator[Contender]:
    directory.mkdir()
    payload = Payload()
    with processes(directory) as started, asyncio.Runner() as runner:
        driver = http_engines.Driver(_addresses(started, engines, "bench.http_engines"))
        runner.run(driver.open())

        def push() -> None:
            payload.renew()
            runner.run(driver.push(payload.version, payload.data))

        try:
            yield Contender(push, lambda: list(started.pids.values()))
        finally:
            runner.run(driver.close())


@contextmanager
def _bare(directory: Path, engines: int) -> Iterator[Contender]:
    directory.mkdir()
    payload = Payload()
    with processes(directory) as started, asyncio.Runner() as runner:
        driver = bare_grpc.Driver(_addresses(started, engines, "bench.bare_grpc"))
        runner.run(driver.open())

        def push() -> None:
            payload.renew()
            runner.run(driver.push(payload.data))

        try:
            yield Contender(push, lambda: list(started.pids.values()))
        finally:
            runner.run(driver.close())


def _addresses(started: Processes, engines: int, module: str) -> list[str]:
    files = []
    for first, count in hosts(engines):
        files.append(started.directory / f"addresses-{first}")
        started.start(f"engines-{first}", "-m", module, str(files[-1]), str(count))
    started.wait(lambda: all(f.exists() for f in files), f"the start of {module}")
    return [line for f in files for line in f.read_text().splitlines()]


@contextmanager
def _ray(engines: int) -> Iterator[Contender]:
    payload = Payload()
    driver = ray_engines.Driver(engines)

    def push() -> None:
        payload.renew()
        driver.push(payload.version, payload.data)

    try:
        yield Contender(push, ray_engines.pids)
    finally:
        driver.close()


def _children() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children()]


# ---- rows ---------------------------------------------------------------------------------------


def _rows(of: Measured, smaller: Measured | None) -> list[Row]:
    rows = [] if smaller is not None else [_first(of)]
    rows += [_against(of, "ours", other) for other in ("http", "ray", "bare") if other in of.taken]
    rows.append(_against(of, "bare", "http"))
    if smaller is not None:
        rows.append(_growth(of, smaller))
    return rows


def _growth(of: Measured, smaller: Measured) -> Row:
    each, before = _each(of), _each(smaller)
    others = [f"{name} {each[name] / before[name]:.2f}" for name in each if name != "ours" and name in before]
    growth = each["ours"] / before["ours"]
    return Row(
        name=f"growth {smaller.engines} → {of.engines}",
        what="median of a push, for each engine, over that of the smaller fleet",
        ours=each["ours"],
        other=before["ours"],
        unit="ms an engine",
        ratio=growth,
        goal="at most linear: <= 1",
        met=growth <= LINEAR_TOLERANCE,
        note=f"the same of the others: {', '.join(others)}",
    )


def _each(of: Measured) -> dict[str, float]:
    """Median by contender, for each engine, in ms."""
    return {name: spread(samples).median / of.engines for name, samples in of.taken.items()}


def _failed(engines: int, error: RuntimeError) -> Row:
    return Row(
        name=f"{engines} engines",
        what="`push` until the fleet decided",
        ours=None,
        other=None,
        unit="ms",
        ratio=None,
        goal="",
        met=False,
        note=f"failed: {error}",
    )


def _first(of: Measured) -> Row:
    ours = spread(of.taken["ours"])
    return Row(
        name="1 engine",
        what="`push` of 4,060 bytes, until the fleet decided",
        ours=ours.median,
        other=None,
        unit="ms",
        ratio=None,
        goal=f"<= {GOAL_ONE_MS:g} ms p50",
        met=ours.median <= GOAL_ONE_MS,
        note=f"p99 {ours.p99:.1f} ms, quickest {min(of.taken['ours']):.1f} ms",
    )


_OTHERS = {
    "http": "HTTP fan-out until every engine said its version",
    "ray": "Ray fan-out until every actor said its version",
    "bare": "the floor: the same messages over grpc.aio, of which nobody makes anything",
}


def _against(of: Measured, one: str, other: str) -> Row:
    """`one`: ours, or the floor: how it stands to HTTP says what could be reached at all."""
    ours, theirs = spread(of.taken[one]), spread(of.taken[other])
    costs = "; ".join(
        f"{name}: p99 {spread(of.taken[name]).p99:.0f} ms, CPU {of.cpu_ms[name]:.0f} ms, PSS {of.pss_mib[name]:.0f} MiB"
        for name in (one, other)
    )
    first = "`push` until the fleet decided" if one == "ours" else _OTHERS[one]
    judged = one == "ours" and other != "bare"
    return Row(
        name=f"{of.engines} engine{'s' if of.engines > 1 else ''}, {other if one == 'ours' else f'{one} and {other}'}",
        what=f"{first}; {_OTHERS[other]}",
        ours=ours.median,
        other=theirs.median,
        unit="ms",
        ratio=statistics.median(a / b for a, b in zip(of.taken[one], of.taken[other], strict=True)),
        goal="ours / other < 1" if judged else "",
        met=ours.median < theirs.median if judged else None,
        note=costs,
        samples={one: of.taken[one], other: of.taken[other]},
    )


def plot(rows: list[Row], axes: Any) -> None:
    """Medians over N, both axes logarithmic; a line of slope 1 is linear growth."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        for contender, values in row.samples.items():
            lines.setdefault(contender, {})[int(row.name.split()[0])] = statistics.median(values)
    for contender, points in lines.items():
        axes.loglog(list(points), list(points.values()), "o-", ms=4, label=contender)
    axes.set_xlabel("engines")
    axes.set_ylabel("ms for one update, median")
    axes.legend(frameon=False)

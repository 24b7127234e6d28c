"""The kill matrix: strikes each process at each phase of a push, and says what became of it.

    python -m tests.kill_matrix.run [--only PHASE:PROCESS[:stop] | --only deaths[:NAME]] [--write docs/failures.md]
                                    [--keep DIRECTORY]

Promises: cells run one after the other, those of one backend on one fleet, which a failed cell costs; the exit code
is 1 if any failed.
Refuses to help the fleet: all that is done for it is what systemd would do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from controlplane.processes import start_time
from tests.kill_matrix.deaths import GROUP, Death, Dying, deaths, put_into, section, section_of
from tests.kill_matrix.dying import run_deaths
from tests.kill_matrix.fleet import Fleet, running_fleet
from tests.kill_matrix.matrix import Blow, Cell, Finding, Outcome, cells, document, table
from tests.support.eventually import eventually
from trainer_agent.agent.launch import lives

START_SECONDS = 180.0
"""Until a fresh fleet serves its first version, and until ranks that died have pushed again."""
STOP_SECONDS = 3.0
"""Longer than the lease."""


class CellFailed(Exception):
    """The cell's fleet is of no more use. Its finding is the argument."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.cell.name)
        self.finding = finding


async def run_cells(todo: Sequence[Cell], directory: Path) -> AsyncIterator[Finding]:
    """One finding a cell. A failed cell's logs stay under `directory`."""
    left = list(todo)
    fleets = 0
    while left:
        fleets += 1
        with suppress(CellFailed):
            backend = left[0].backend
            async with running_fleet(directory / f"fleet-{fleets}", backend) as fleet:
                while left and left[0].backend is backend:
                    finding = await run_cell(fleet, left.pop(0))
                    yield finding
                    if finding.problems:
                        raise CellFailed(finding)


@dataclass(frozen=True)
class Struck:
    """A blow that fell."""

    held: int
    """The held push's number."""
    at: float
    """Monotonic seconds."""
    below: Mapping[int, int]
    """What the killed process had started, each with its start time."""

    @property
    def seconds(self) -> float:
        """Since it fell."""
        return time.monotonic() - self.at

    @property
    def left_behind(self) -> list[int]:
        """Processes that live though the one that started them was killed."""
        return [pid for pid, started in self.below.items() if start_time(pid) == started]


async def run_cell(fleet: Fleet, cell: Cell) -> Finding:
    """Hold, strike, let go, wait until all is well."""
    try:
        await eventually(fleet.whole_at, within=START_SECONDS)
        await eventually(lambda: fleet.pid_of(cell.process), within=START_SECONDS)
        struck = await _strike(fleet, cell)
    except AssertionError as error:
        return Finding(cell, problems=(f"the phase was not reached: {error}", *fleet.take_problems()))
    return await _healed(fleet, cell, struck)


async def _strike(fleet: Fleet, cell: Cell) -> Struck:
    holder, point = fleet.daemons[cell.phase.holder], cell.phase.point
    holder.arm(point, cell.phase.arm)
    try:
        await eventually(lambda: holder.reached(point), within=START_SECONDS)
        pid = fleet.pid_of(cell.process)
        below = lives(pid) if cell.blow is Blow.KILL else {}
        struck = Struck(fleet.ledger.newest, time.monotonic(), below)
        os.kill(pid, signal.SIGKILL if cell.blow is Blow.KILL else signal.SIGSTOP)
    finally:
        holder.let_go(point)
    if cell.blow is Blow.STOP:
        await eventually(lambda: struck.seconds >= STOP_SECONDS)
        os.kill(pid, signal.SIGCONT)
    return struck


async def _healed(fleet: Fleet, cell: Cell, struck: Struck) -> Finding:
    outcome: Outcome | None = None
    whole = later = 0.0
    problems: list[str] = []
    try:
        await eventually(lambda: _whole(fleet, struck.held), within=cell.limit_seconds - struck.seconds)
        whole = struck.seconds
        await eventually(lambda: _whole(fleet, struck.held + 1), within=START_SECONDS)
        later = struck.seconds
        outcome = await eventually(lambda: fleet.ledger.outcome(struck.held))
        await eventually(lambda: _nothing_left(struck))
    except AssertionError as error:
        problems.append(f"version {struck.held}: {error}")
    problems += fleet.take_problems()
    return Finding(cell, outcome, whole, later, tuple(problems))


def _nothing_left(struck: Struck) -> bool:
    left = struck.left_behind
    assert not left, f"processes {left} outlive the one that started them"
    return True


async def _whole(fleet: Fleet, at_least: int) -> bool:
    number = await fleet.whole_at()
    assert number >= at_least, f"the fleet serves {number}, not {at_least} or later"
    return True


async def run_all(todo: Sequence[Cell], directory: Path) -> list[Finding]:
    findings = []
    async for finding in run_cells(todo, directory):
        findings.append(finding)
        more = "; ".join(finding.problems) or f"next push after {finding.next_seconds:.1f} s"
        print(f"[{len(findings)}/{len(todo)}] {finding.cell.name}: {finding.text}; {more}", flush=True)
    return findings


async def run_all_deaths(todo: Sequence[Death], directory: Path) -> list[Dying]:
    found = []
    async for dying in run_deaths(todo, directory):
        found.append(dying)
        print(f"[{len(found)}/{len(todo)}] {dying.death.name}: {dying.text}; {'; '.join(dying.problems)}", flush=True)
    return found


def chosen(only: str) -> tuple[Sequence[Cell], Sequence[Death]]:
    """What `--only` names; nothing: everything. Raises ValueError: it names nothing."""
    group = only.partition(":")[0] == GROUP
    return ([] if group else cells(only)), (deaths(only) if group or not only else ())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="PHASE[:PROCESS[:stop]], a part may be empty; or deaths[:NAME]")
    parser.add_argument("--write", type=Path, help="write the tables and their introduction here")
    parser.add_argument(
        "--keep", type=Path, help="where failed cells leave their logs  [default: a temporary directory]"
    )
    given = parser.parse_args()
    try:
        todo, dying = chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the fleet is ended then too
    directory = given.keep or Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    began = time.monotonic()
    findings = asyncio.run(run_all(todo, directory))
    seconds = time.monotonic() - began
    for blow in Blow:
        print(f"\n{blow.value}\n\n{table(findings, blow)}")
    died = asyncio.run(run_all_deaths(dying, directory))
    print(f"\n{section(died)}")
    failed = sum(bool(f.problems) for f in findings) + sum(bool(d.problems) for d in died)
    print(f"\n{len(findings) + len(died)} cells in {time.monotonic() - began:.0f} s, {failed} failed")
    if failed:
        print(f"logs: {directory}")
    else:
        directory.rmdir()
    if given.write is not None:
        old = given.write.read_text() if given.write.exists() else ""
        page = document(findings, seconds) if findings else old
        own = section(died) if died else section_of(old)
        given.write.write_text(put_into(page, own) if own else page)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

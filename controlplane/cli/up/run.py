"""A fleet's processes on this machine, kept running until Ctrl-C.

Promises that a process which dies is started again after a growing wait, within a limit, unless its exit code says that
this cannot help; and that at the end nothing is left. For a fleet of several machines the same file is read by a unit
or container for each engine.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from controlplane.cli.crew import Child, Crew, died
from controlplane.cli.ending import CommandFailed
from controlplane.cli.up.settings import CheckedFleet
from controlplane.exit_codes import ExitCode

COORDINATOR_SECONDS = 30.0
"""For its address to be bound."""
POLL_SECONDS = 0.1
RESTART_WAIT_SECONDS = (1.0, 30.0)
"""First and longest wait before a process is started again; doubled in between."""
MAX_RESTARTS = 5
"""In a row: of a process that lived LONG_LIFE_SECONDS the next death counts as its first."""
LONG_LIFE_SECONDS = 600.0
FINAL = frozenset(
    {ExitCode.OK, ExitCode.USAGE, ExitCode.CONFIG, ExitCode.PORT_IN_USE, ExitCode.FENCED, ExitCode.LEDGER}
)
"""Ends after which the same start would end the same."""


def run_fleet(plan: CheckedFleet, file: Path, *, on_ray: bool = False) -> int:
    """Until Ctrl-C. `on_ray`: each engine is a stand-in of one on a Ray node. Raises CommandFailed: the coordinator
    cannot run."""
    return asyncio.run(_interruptible(plan, file, on_ray=on_ray))


async def _interruptible(plan: CheckedFleet, file: Path, *, on_ray: bool) -> int:
    console, mark = Console(stderr=True, highlight=False), f"up-{uuid.uuid4().hex[:8]}"
    logs = plan.file.state_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(ExitCode.CONFIG, f"{logs}: {error.strerror}") from error
    crew = Crew(logs, mark, {})
    running = asyncio.create_task(_run(_Fleet(plan, file.resolve(), crew, console, on_ray)))

    def interrupt() -> None:
        crew.hurry = running.cancelling() > 0
        if not crew.hurry:
            console.print("ending every process …")
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    try:
        await running
    except asyncio.CancelledError:
        return ExitCode.INTERRUPTED
    finally:
        await crew.stop_all()
    return ExitCode.OK


async def _run(fleet: _Fleet) -> None:
    with tempfile.TemporaryDirectory(prefix="weightplane-up-") as scratch:
        await fleet.run(Path(scratch, "coordinator.address"))


@dataclass
class _Fleet:
    """The running processes of a fleet file."""

    plan: CheckedFleet
    file: Path
    crew: Crew
    console: Console
    on_ray: bool

    async def run(self, address_file: Path) -> None:
        """Until cancelled, or until the coordinator cannot run. Raises CommandFailed then."""
        words = ("coordinator", "--fleet", str(self.file), "--set", f"address_file={address_file}")
        first = await self.crew.weightplane("coordinator", *words)
        await self.crew.within(COORDINATOR_SECONDS, "the coordinator to serve", _appears(address_file))
        self.console.print(f"coordinator serves at {address_file.read_text()}; logs: {first.log.parent}")
        coordinator = asyncio.create_task(self._keep(first, words))
        engines = [asyncio.create_task(self._engine(e.engine_id)) for e in self.plan.engines]
        try:
            raise died(await coordinator)
        finally:
            for task in (coordinator, *engines):
                task.cancel()
            await asyncio.gather(coordinator, *engines, return_exceptions=True)

    async def _engine(self, engine_id: str) -> None:
        words = ("engine", "--fleet", str(self.file), "--id", engine_id, *(["--ray"] if self.on_ray else []))
        await self._keep(await self.crew.weightplane(engine_id, *words), words)

    async def _keep(self, child: Child, words: tuple[str, ...]) -> Child:
        """Start it again whenever it ends, as long as that can help. Returns the last one, ended."""
        failures = 0
        while True:
            began = time.monotonic()
            self.console.print(f"{child.name}: started, pid {child.process.pid}")
            code = await child.process.wait()
            failures = 1 if time.monotonic() - began > LONG_LIFE_SECONDS else failures + 1
            if code in FINAL or failures > MAX_RESTARTS:
                why = "a restart would not help" if code in FINAL else f"it ended {failures} times"
                self.console.print(f"{died(child)}\n{child.name}: not started again: {why}")
                return child
            wait = min(RESTART_WAIT_SECONDS[0] * 2 ** (failures - 1), RESTART_WAIT_SECONDS[1])
            self.console.print(f"{child.name}: ended with code {code}; again in {wait:.0f} s")
            await self.crew.stop(child)
            await asyncio.sleep(wait)
            child = await self.crew.weightplane(child.name, *words)


async def _appears(file: Path) -> None:
    while not file.exists():  # noqa: ASYNC110 - a file tells nobody that it came
        await asyncio.sleep(POLL_SECONDS)

"""A fleet file's processes, kept running until Ctrl-C: all on this machine, or engines and trainers on a Ray cluster.

Promises that a process which dies is started again after a growing wait, within a limit, unless its exit code says that
this cannot help; and that at the end nothing is left. The coordinator stays on this machine, where its ledger is. For a
fleet that nobody here supervises the same file is read by a unit or container for each process.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from controlplane.cli.crew import Crew
from controlplane.cli.ending import CommandFailed
from controlplane.cli.up.on_ray import RayCluster, connected
from controlplane.cli.up.places import Ended, Place, Process, ThisMachine
from controlplane.cli.up.restarts import Deaths, Never
from controlplane.cli.up.settings import CheckedFleet
from controlplane.exit_codes import ExitCode
from controlplane.fleet_file import COORDINATOR, placed
from controlplane.rpc.addresses import is_loopback, split_address
from engine_agent.daemon.settings import EngineSettings

COORDINATOR_SECONDS = 30.0
"""For its address to be bound."""
POLL_SECONDS = 0.1
ANY_LOCAL_PORT = EngineSettings.listen
"""What engines and trainers listen at where the file says nothing."""


def run_fleet(plan: CheckedFleet, file: Path, *, on_ray: bool = False) -> int:
    """Until Ctrl-C. `on_ray`: engines and trainers on the cluster at RAY_ADDRESS. Raises CommandFailed: the
    coordinator cannot run, or there is no cluster."""
    console, logs = Console(stderr=True, highlight=False, soft_wrap=True), plan.file.state_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(ExitCode.CONFIG, f"{logs}: {error.strerror}") from error
    crew = Crew(logs, f"up-{uuid.uuid4().hex[:8]}", {})
    cluster = _cluster(plan, logs, console) if on_ray else None
    return asyncio.run(_interruptible(_Fleet(plan, file.resolve(), crew, console, cluster)))


def _cluster(plan: CheckedFleet, logs: Path, console: Console) -> RayCluster:
    """With room asked for. Raises CommandFailed: also if its nodes cannot reach the coordinator."""
    cluster = connected(str(logs.resolve()), console.print)
    far = [node for node in sorted(cluster.addresses() - {cluster.here}) if not is_loopback(node)]
    if far and is_loopback(split_address(plan.file.address)[0]):
        where = f"address: {plan.file.address} is this host's alone"
        raise CommandFailed(ExitCode.CONFIG, f"{where}, and the cluster has nodes at {', '.join(far)}")
    cluster.reserve(placed(plan.file, gpu=cluster.has_gpus))
    return cluster


async def _interruptible(fleet: _Fleet) -> int:
    running = asyncio.create_task(_run(fleet))

    def interrupt() -> None:
        if running.cancelling() > 0:
            fleet.hurry()
            return
        fleet.console.print("ending every process …")
        running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    try:
        await running
    except asyncio.CancelledError:
        return ExitCode.INTERRUPTED
    finally:
        await fleet.stop_all()
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
    cluster: RayCluster | None

    async def run(self, address_file: Path) -> None:
        """Until cancelled, or until the coordinator cannot run. Raises CommandFailed then."""
        here = ThisMachine(self.crew)
        words = ("coordinator", "--fleet", str(self.file), "--set", f"address_file={address_file}")
        coordinator = asyncio.create_task(self._keep(Process(COORDINATOR, words), here))
        others: list[asyncio.Task[Ended]] = []
        try:
            address = await self._serves(coordinator, address_file)
            self.console.print(f"coordinator serves at {address}; logs: {self.plan.file.state_dir / 'logs'}")
            others += [asyncio.create_task(self._keep(p, self.cluster or here)) for p in self._processes()]
            raise CommandFailed(ExitCode.FAILED, (await coordinator).said)
        finally:
            for task in (coordinator, *others):
                task.cancel()
            await asyncio.gather(coordinator, *others, return_exceptions=True)

    def _processes(self) -> Iterator[Process]:
        """Engines first: ranks that share their devices ask them which these are."""
        named = ("--fleet", str(self.file), "--id")
        anywhere = self.cluster is not None and len(self.cluster.addresses()) > 1
        for engine in self.plan.engines:
            words = ("engine", *named, engine.engine_id)
            open_ = anywhere and engine.listen == ANY_LOCAL_PORT
            yield Process(engine.engine_id, words, engine.vllm is not None, open_)
        for trainer in (checked.settings for checked in self.plan.trainers):
            words = ("trainer", *named, trainer.trainer_id)
            yield Process(trainer.trainer_id, words, listens_anywhere=anywhere and trainer.listen == ANY_LOCAL_PORT)

    async def _serves(self, coordinator: asyncio.Task[Ended], address_file: Path) -> str:
        """Where it serves. Raises CommandFailed: it cannot, or did not in time."""
        bound = asyncio.create_task(_appears(address_file))
        try:
            await asyncio.wait({bound, coordinator}, timeout=COORDINATOR_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            bound.cancel()
        if coordinator.done():
            raise CommandFailed(ExitCode.FAILED, coordinator.result().said)
        if not bound.done():
            text = f"waited {COORDINATOR_SECONDS:.0f} s for the coordinator to serve"
            raise CommandFailed(ExitCode.FAILED, text)
        return bound.result()

    async def _keep(self, process: Process, place: Place) -> Ended:
        """Start it again whenever it ends, as long as that can help. How it ended for good."""
        deaths, name = Deaths(), process.name
        while True:
            began = time.monotonic()
            ended = await place.run(process, lambda where: self.console.print(f"{name}: started, {where}"))
            deaths = deaths.after(time.monotonic() - began)
            verdict = deaths.verdict(ended.code)
            if isinstance(verdict, Never):
                self.console.print(f"{ended.said}\n{name}: not started again: {verdict.why}")
                return ended
            how = ended.said if ended.code is None else f"{name}: ended with code {ended.code}"
            self.console.print(f"{how}; again in {verdict.seconds:.0f} s")
            await asyncio.sleep(verdict.seconds)

    async def stop_all(self) -> None:
        """Those on the cluster first: the coordinator outlives them all."""
        if self.cluster is not None:
            await self.cluster.stop_all()
        await self.crew.stop_all()

    def hurry(self) -> None:
        """End them at once."""
        if self.cluster is not None:
            self.cluster.hurry()
        ThisMachine(self.crew).hurry()


async def _appears(file: Path) -> str:
    while not (file.exists() and file.read_text()):  # noqa: ASYNC110 - a file tells nobody that it came
        await asyncio.sleep(POLL_SECONDS)
    return file.read_text()

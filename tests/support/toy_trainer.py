"""A trainer under test: real rank processes, beside a trainer agent in this process, or launched by one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.memory.engine import MemorySettings
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.toy_rank import SHAPES, Script
from trainer_agent import wire
from trainer_agent.agent.daemon import TrainerAgent
from trainer_agent.agent.settings import TrainerSettings
from trainer_agent.rank.devices import CPU_DEVICE_VARIABLE

SMALL_CHUNK_BYTES = 64 * 1024


def toy_rank(script: Script) -> list[str]:
    """The module and its argument."""
    return ["tests.support.toy_rank", json.dumps(asdict(script))]


class RankProcess:
    """One rank, and the lines that it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, script: Script, environment: Mapping[str, str]) -> RankProcess:
        return await cls.run(toy_rank(script), environment)

    @classmethod
    async def run(cls, module: Sequence[str], environment: Mapping[str, str]) -> RankProcess:
        """A module, and its arguments."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        return cls(process)

    def said(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    async def tell(self, order: Any, within: float = 250.0) -> dict[str, Any]:
        """Tell a `told_rank` what to push; how that ended, in its words."""

        def ends() -> list[dict[str, Any]]:
            return [line for line in self.lines if line["event"] in ("pushed", "failed")]

        before = len(ends())
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        await eventually(lambda: len(ends()) > before, within=within)
        return ends()[-1]

    async def code(self, within: float = 200.0) -> int:
        """Its exit code; waits for it."""
        code = await asyncio.wait_for(self.process.wait(), within)
        await self._reader
        return code

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            with suppress(json.JSONDecodeError):
                self.lines.append(json.loads(line))


class ToyTrainer:
    """A trainer agent in this process, and its ranks."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="weightplane-test-"))
        self.agent = TrainerAgent(settings, self.directory / "ranks.sock")
        self.ranks: list[RankProcess] = []

    async def start_ranks(self, script: Script, world: int = 2, **environment: str) -> list[RankProcess]:
        """One life of ranks; returns once they were started, not joined."""
        return await self.run_ranks(toy_rank(script), world, **environment)

    async def run_ranks(self, module: Sequence[str], world: int = 2, **environment: str) -> list[RankProcess]:
        """The same, of any module that joins."""
        self.ranks = [await self._start(module, rank, world, environment) for rank in range(world)]
        return self.ranks

    async def join_ranks_in(self, order: Sequence[int], script: Script, devices: Sequence[int]) -> list[RankProcess]:
        """One life of ranks, of which each starts when the one before it in `order` has connected. Rank i computes on
        CPU device `devices[i]`. The result is by rank."""
        started: dict[int, RankProcess] = {}
        for rank in order:
            device = {CPU_DEVICE_VARIABLE: str(devices[rank])}
            started[rank] = await self._start(toy_rank(script), rank, len(devices), device)
            self.ranks = list(started.values())
            await eventually(lambda: len(self.agent.pids) == len(self.ranks), within=120)
        self.ranks = [started[rank] for rank in range(len(devices))]
        return self.ranks

    async def _start(self, module: Sequence[str], rank: int, world: int, environment: Mapping[str, str]) -> RankProcess:
        ids = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        socket = {wire.RANK_SOCKET_VARIABLE: str(self.directory / "ranks.sock")}
        return await RankProcess.run(module, {**ids, **socket, **environment})

    async def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            await rank.process.wait()
        await self.agent.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@asynccontextmanager
async def toy_trainer(coordinator: str, **settings: Any) -> AsyncIterator[ToyTrainer]:
    """A started trainer agent without ranks yet."""
    values: dict[str, Any] = {"coordinator": coordinator, "chunk_bytes": SMALL_CHUNK_BYTES, "trainer_id": "toy"}
    trainer = ToyTrainer(TrainerSettings(**values | settings))
    await trainer.agent.start()
    try:
        yield trainer
    finally:
        await trainer.close()


@asynccontextmanager
async def fleet_for_toys(directory: Path, engines: int = 2, **settings: Any) -> AsyncIterator[LocalFleet]:
    """A coordinator and in-memory engines that expect the toy's tensors; nobody holds the lease."""
    fleet = LocalFleet(directory)
    try:
        await fleet.start_coordinator(**settings)
        for i in range(engines):
            start_engine(fleet, f"e{i}")
        await fleet.wait_for_engines(engines)
        yield fleet
    finally:
        await fleet.close()


def engine_settings(
    fleet: LocalFleet, engine_id: str, tensors: Mapping[str, tuple[int, ...]] = SHAPES, **more: Any
) -> EngineSettings:
    """An in-memory engine that expects `tensors`; `more` goes to the engine where it is one of its settings."""
    memory = {k: more.pop(k) for k in ("install_seconds", "device_uuids", "kv_bytes", "can_sleep") if k in more}
    return EngineSettings(
        engine_id=engine_id,
        coordinator=fleet.address,
        run_id=RUN,
        state_dir=fleet.directory / "engines",
        backend="memory",
        memory=MemorySettings(tensors={**tensors, "tied": tensors["embed"]}, **memory),
        **{"stream_idle_seconds": 20.0, **more},
    )


def start_engine(fleet: LocalFleet, engine_id: str, **more: Any) -> None:
    """In this process; see `engine_settings`."""
    fleet._start(engine_id, run_engine, engine_settings(fleet, engine_id, **more))


class EngineProcess:
    """An engine agent that can be killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, fleet: LocalFleet, engine_id: str = "e0", install_seconds: float = 0.0, device: str = ""
    ) -> EngineProcess:
        where = [fleet.address, str(fleet.directory), engine_id, str(install_seconds), device]
        return cls(await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.support.toy_trainer", *where))

    async def kill(self) -> None:
        self._process.kill()
        await self.died()

    async def died(self) -> None:
        assert await asyncio.wait_for(self._process.wait(), 100) == -signal.SIGKILL

    async def stop(self) -> None:
        self._process.terminate()
        await self.ended()

    async def ended(self) -> int:
        """Its exit code, once it ends."""
        return await asyncio.wait_for(self._process.wait(), 120)


def segments() -> list[str]:
    """Names of rank segments that exist now."""
    return sorted(p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(f"weightplane-{RUN}-"))


def main() -> None:
    """An engine agent as a process: coordinator, directory, name, seconds that an install takes, and its device, or
    nothing."""
    fleet = LocalFleet(Path(sys.argv[2]))
    fleet.address = sys.argv[1]
    memory: dict[str, Any] = {"device_uuids": (sys.argv[5],)} if sys.argv[5] else {}
    settings = engine_settings(fleet, sys.argv[3], install_seconds=float(sys.argv[4]), **memory)
    sys.exit(asyncio.run(run_engine(settings)))


if __name__ == "__main__":
    main()

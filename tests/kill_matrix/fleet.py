"""A fleet of real processes under a supervisor.

Promises: each daemon is started again with the same command when it ends, as systemd would, except where its exit code
says never to (FENCED); everything that was started is ended at the close, by its pid. An observer looks at each engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from controlplane.exit_codes import ExitCode
from controlplane.failpoints import DIRECTORY_VARIABLE
from controlplane.processes import start_time
from controlplane.rpc.channels import open_channel
from engine_agent.vllm.checkpoint import HEAD_NAME
from tests.kill_matrix.matrix import Backend
from tests.kill_matrix.observer import LOOK_SECONDS, RUN, Ledger, LogTail, Observer
from tests.kill_matrix.truth import VOCABULARY, MemoryTruth, Truth, VllmTruth
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_rank import EMBEDDING_NAME, TinyWeights
from tests.support.toy_rank import SHAPES, Script
from trainer_agent.agent.launch import lives
from weightplane.v1 import operator_pb2, operator_pb2_grpc

ROOT = Path(__file__).parents[2]
RANKS = ROOT / "tests" / "support"
ENGINES = ("e0", "e1")
RESTART_SECONDS = 0.2
END_SECONDS = 15.0


class Daemon:
    """One supervised process."""

    def __init__(self, name: str, arguments: list[str], directory: Path) -> None:
        self.name = name
        self.command = arguments[0]
        self.failpoints = directory / f"{name}-failpoints"
        self.failpoints.mkdir()
        self.log = directory / f"{name}.log"
        self.starts = 0
        self.exits: list[int] = []
        """How each life that is over ended."""
        self.given_up: int | None = None
        """The exit code after which it is not started again."""
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor = asyncio.create_task(self._supervise())

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    def arm(self, point: str, text: str) -> None:
        self.forget(point)
        (self.failpoints / point).write_text(text)

    def reached(self, point: str) -> bool:
        return (self.failpoints / f"{point}.reached").exists()

    def let_go(self, point: str) -> None:
        (self.failpoints / f"{point}.go").touch()

    def forget(self, point: str) -> None:
        for suffix in ("", ".reached", ".go"):
            (self.failpoints / f"{point}{suffix}").unlink(missing_ok=True)

    async def close(self) -> None:
        """SIGTERM, then SIGKILL for it and for whatever it had started."""
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        process = self._process
        if process is None:
            return
        below = lives(process.pid) if process.returncode is None else {}
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_SECONDS)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for pid, started in below.items():
            if start_time(pid) == started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def _supervise(self) -> None:
        while True:
            await self._start()
            assert self._process is not None, "just started"
            code = await self._process.wait()
            self.exits.append(code)
            if code == ExitCode.FENCED:
                self.given_up = code
                return
            await asyncio.sleep(RESTART_SECONDS)

    async def _start(self) -> None:
        self.starts += 1
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}",
            "PYTHONUNBUFFERED": "1",
            DIRECTORY_VARIABLE: str(self.failpoints),
        }
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "controlplane.cli.main",
                self._arguments[0],
                f"--die-with-parent={os.getpid()}",
                *self._arguments[1:],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=ROOT,
            )


@dataclass(frozen=True)
class Cargo:
    """What a fleet's trainer pushes, and to whom."""

    rank: Path = RANKS / "toy_rank.py"
    """The script of its ranks."""
    arguments: tuple[str, ...] = ()
    """The script's, after its first."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {**SHAPES, "tied": SHAPES["embed"]})
    """What an in-memory engine expects."""
    vllm: Path | None = None
    """Directory of the model with which e0 is a vLLM engine; None: it is in memory."""
    truths: tuple[Truth, ...] = (MemoryTruth(), MemoryTruth())
    """About e0 and e1."""


def _cargo(backend: Backend, directory: Path) -> Cargo:
    if backend is Backend.MEMORY:
        return Cargo()
    model = make_tiny_model(directory / "model", seed=0)
    weights = TinyWeights(model)
    shapes = weights.shapes
    return Cargo(
        rank=RANKS / "tiny_rank.py",
        arguments=(str(model),),
        shapes={**shapes, HEAD_NAME: shapes[EMBEDDING_NAME]},
        vllm=model,
        truths=(VllmTruth(model), MemoryTruth(weights.tensors_of)),
    )


class Fleet:
    """The processes, their supervisor and their observers."""

    def __init__(self, directory: Path, backend: Backend = Backend.MEMORY) -> None:
        self.directory = directory
        self.backend = backend
        self.ports = dict(zip(("coordinator", *ENGINES), _free_ports(1 + len(ENGINES)), strict=True))
        self.daemons: dict[str, Daemon] = {}
        self.channels = {name: open_channel(f"127.0.0.1:{port}") for name, port in self.ports.items()}
        self.ledger = Ledger(directory / "coordinator.log")
        self._cargo = _cargo(backend, directory)
        self.observers = {
            e: Observer(e, self.channels[e], self.ledger, truth)
            for e, truth in zip(ENGINES, self._cargo.truths, strict=True)
        }
        self._watches: list[asyncio.Task[None]] = []
        self._ranks: dict[int, int] = {}
        self._rank_lines = LogTail(directory / "trainer.log")

    @property
    def address(self) -> str:
        """Of the coordinator."""
        return f"127.0.0.1:{self.ports['coordinator']}"

    def start(self) -> None:
        """All but a trainer."""
        lease = {"heartbeat_seconds": 0.2, "lease_ttl_seconds": 2.0}
        self._daemon("coordinator", "coordinator", {"listen": self.address, "run_id": RUN, **lease})
        for engine_id, devices in (("e0", []), ("e1", [0, 1])):
            self._daemon(engine_id, "engine", self._engine(engine_id, devices))
        self._watches += [asyncio.create_task(o.watch()) for o in self.observers.values()]

    def start_trainer(self, name: str = "trainer", *, takeover: bool = False, **script: Any) -> Daemon:
        """One that pushes without end; `script` goes over what its ranks do."""
        ranks = Script(**{"steps": 1_000_000, "pause_before_step": 0.3, "push_timeout": 20.0, **script})
        settings = {"coordinator": self.address, "run_id": RUN, "trainer_id": name, "nproc_per_node": 2}
        settings |= {"max_restarts": 1000, "chunk_bytes": 65536, "stop_seconds": 5.0, "takeover": takeover}
        command = [str(self._cargo.rank), json.dumps(asdict(ranks)), *self._cargo.arguments]
        return self._daemon(name, "trainer", settings, "--", *command)

    async def close(self) -> None:
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        trainers = [d for d in self.daemons.values() if d.command == "trainer"]
        await asyncio.gather(*(d.close() for d in trainers))  # they say goodbye to the others
        await asyncio.gather(*(d.close() for d in self.daemons.values() if d not in trainers))
        for channel in self.channels.values():
            await channel.close()

    def pid_of(self, process: str) -> int:
        """Of a process as the matrix names it. Raises AssertionError where it does not live."""
        if process in ("leader", "rank"):
            return self._rank(0 if process == "leader" else 1)
        return self.daemons["e0" if process in ("engine", "vllm") else process].pid

    def _rank(self, number: int) -> int:
        for line in self._rank_lines.fresh():
            if line.get("event") == "joined":
                self._ranks[int(line["rank"])] = int(line["pid"])
        assert number in self._ranks, f"rank {number} never joined"
        assert start_time(self._ranks[number]) is not None, f"rank {number} does not live"
        return self._ranks[number]

    async def view(self) -> operator_pb2.FleetView | None:
        """As the coordinator sees it; None: it says nothing."""
        stub: Any = operator_pb2_grpc.OperatorStub(self.channels["coordinator"])
        try:
            response = await stub.GetFleet(operator_pb2.GetFleetRequest(run_id=RUN), timeout=LOOK_SECONDS)
        except grpc.aio.AioRpcError:
            return None
        assert isinstance(response.fleet, operator_pb2.FleetView)
        return response.fleet

    async def whole_at(self) -> int:
        """The one number that both engines serve and are routed for, and make tokens of. Raises AssertionError."""
        view = await self.view()
        assert view is not None, "the coordinator does not answer"
        assert not view.recovering, "the coordinator is recovering"
        served = [v.number for model in view.state.models for v in model.served]
        assert len(served) == 1, f"served: {served}"
        for engine in view.engines:
            assert engine.routable, f"{engine.status.engine.engine_id} is not routable ({engine.status.word})"
            assert engine.status.applied.number == served[0], "an engine holds another version"
        assert len(view.engines) == len(ENGINES), "an engine is missing"
        for observer in self.observers.values():
            assert observer.sampled >= served[0], f"{observer.engine_id} made no tokens of {served[0]} yet"
        return served[0]

    def take_problems(self) -> list[str]:
        """What was wrong since the last call, each thing once."""
        found = [w for o in self.observers.values() for w in o.wrong]
        for observer in self.observers.values():
            observer.wrong.clear()
        found += [f"{d.name} ended with {d.given_up}, for good" for d in self.daemons.values() if d.given_up]
        found += [f"an observer broke: {t.exception()!r}" for t in self._watches if t.done()]
        return list(dict.fromkeys(found))

    def _daemon(self, name: str, command: str, settings: dict[str, Any], *more: str) -> Daemon:
        config = self.directory / f"{name}.toml"
        config.write_text(_toml(settings | {"state_dir": str(self.directory / f"{name}-state")}))
        daemon = self.daemons[name] = Daemon(name, [command, "--config", str(config), *more], self.directory)
        return daemon

    def _engine(self, engine_id: str, devices: list[int]) -> dict[str, Any]:
        settings = {
            "engine_id": engine_id,
            "coordinator": self.address,
            "run_id": RUN,
            "listen": f"127.0.0.1:{self.ports[engine_id]}",
            "cpu_devices": devices,
            "stream_idle_seconds": 5.0,
            "max_restarts": 1000,
        }
        if self._cargo.vllm is not None and engine_id == "e0":
            model = {"model": str(self._cargo.vllm), "dtype": "float32", "max_model_len": 128}
            return settings | {"vllm": model | {"kv_cache_memory_bytes": 32 << 20}}
        tensors = {name: list(shape) for name, shape in self._cargo.shapes.items()}
        memory = {"install_seconds": 0.1, "vocab_size": VOCABULARY, "tensors": tensors}
        return settings | {"backend": "memory", "memory": memory}


@asynccontextmanager
async def running_fleet(
    directory: Path, backend: Backend = Backend.MEMORY, *, trains: bool = True
) -> AsyncIterator[Fleet]:
    """A started fleet in an empty directory, which is removed unless something failed inside."""
    directory.mkdir(parents=True)
    fleet = Fleet(directory, backend)
    try:
        fleet.start()
        if trains:
            fleet.start_trainer()
        yield fleet
    finally:
        await fleet.close()
    shutil.rmtree(directory)


def _toml(settings: dict[str, Any], table: str = "") -> str:
    lines = [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in settings.items() if not isinstance(v, dict)]
    for name, inner in settings.items():
        if isinstance(inner, dict):
            path = f"{table}.{name}" if table else name
            lines += [f"[{path}]", _toml(inner, path)]
    return "\n".join(lines)


def _free_ports(count: int) -> list[int]:
    """All at once, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()

"""A fleet of real processes under a supervisor, and an observer that looks at every version it claims.

Promises: each daemon is started again with the same command when it ends, as systemd would, except where its exit code
says never to (FENCED); everything that was started is ended at the close, by its pid. What a version's weights
are is taken from the coordinator's log of what it wrote, never from an engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import xxhash

from controlplane.core.layout import content_digest
from controlplane.exit_codes import ExitCode
from controlplane.failpoints import DIRECTORY_VARIABLE
from controlplane.processes import descendants, start_time
from controlplane.rpc.channels import open_channel
from engine_agent.memory_engine import token_of, weights_of
from tests.kill_matrix.matrix import Outcome
from tests.support.toy_rank import SHAPES, Script, tensors_of
from weightplane.v1 import (
    engine_pb2,
    lifecycle_pb2,
    lifecycle_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
)

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "support" / "toy_rank.py"
RUN = "kill-matrix"
ENGINES = ("e0", "e1")
PROMPT = (1, 2, 3)
VOCABULARY = 256
SAMPLE_TOKENS = 4
LOOK_SECONDS = 0.5
"""Longest wait for one answer: a daemon that is held or stopped gives none."""
EVERY_SECONDS = 0.05
RESTART_SECONDS = 0.2
END_SECONDS = 15.0
_BEGAN = re.compile(r"version=WeightVersion\(number=(\d+), term=\d+\), step=(\d+)")
_UPDATE = re.compile(r"update_id='([^']+)'")
_PHASE = re.compile(r"<Phase\.([A-Z]+)")


class Daemon:
    """One supervised process."""

    def __init__(self, name: str, arguments: list[str], directory: Path) -> None:
        self.name = name
        self.failpoints = directory / f"{name}-failpoints"
        self.failpoints.mkdir()
        self.log = directory / f"{name}.log"
        self.starts = 0
        self.given_up: int | None = None
        """The exit code after which it is not started again."""
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self._below: dict[int, int] = {}
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
        below = {p: start_time(p) for p in descendants(process.pid)} if process.returncode is None else {}
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_SECONDS)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for pid, started in below.items():
            if started is not None and start_time(pid) == started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def _supervise(self) -> None:
        while True:
            await self._start()
            assert self._process is not None, "just started"
            code = await self._process.wait()
            if code == ExitCode.FENCED:
                self.given_up = code
                return
            await asyncio.sleep(RESTART_SECONDS)

    async def _start(self) -> None:
        self.starts += 1
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
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


class LogTail:
    """The JSON lines of a log, each read once. Lines that are none are somebody else's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def fresh(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with suppress(ValueError):
                    parsed = json.loads(line)
                    if isinstance(parsed, dict):
                        yield parsed


class Ledger:
    """What the coordinator wrote, from its log: the step of each number, and how each update was decided."""

    def __init__(self, log: Path) -> None:
        self._tail = LogTail(log)
        self._numbers: dict[str, int] = {}
        self._steps: dict[int, int] = {}
        self._phases: dict[int, str] = {}

    def step(self, number: int) -> int | None:
        self._read()
        return self._steps.get(number)

    @property
    def newest(self) -> int:
        """The latest number given; 0: none."""
        self._read()
        return max(self._steps, default=0)

    def outcome(self, number: int) -> Outcome | None:
        """None: nothing about it was written yet."""
        self._read()
        phase = self._phases.get(number)
        return (
            None
            if phase is None
            else {"COMMITTED": Outcome.COMMITTED, "DEGRADED": Outcome.DEGRADED}.get(phase, Outcome.KEPT)
        )

    def _read(self) -> None:
        for line in self._tail.fresh():
            if line.get("event") == "record_written":
                self._take(str(line["kind"]), str(line["record"]))

    def _take(self, kind: str, record: str) -> None:
        update = _UPDATE.search(record)
        if kind == "UpdateBegan" and update is not None and (began := _BEGAN.search(record)) is not None:
            self._numbers[update[1]] = int(began[1])
            self._steps[int(began[1])] = int(began[2])
        elif kind == "UpdateDecided" and update is not None and (phase := _PHASE.search(record)) is not None:
            self._phases[self._numbers[update[1]]] = phase[1]


@dataclass(frozen=True, slots=True)
class Truth:
    """A step's weights, computed here."""

    content: bytes
    tokens: tuple[int, ...]


@cache
def truth_of(step: int) -> Truth:
    """What an engine with the weights of this step says."""
    parts = {name: tensor.numpy().tobytes() for name, tensor in tensors_of(step).items()}
    weights = weights_of({name: hashlib.sha256(part).digest() for name, part in parts.items()})
    return Truth(
        content_digest([xxhash.xxh3_64_digest(part) for part in parts.values()]),
        tuple(token_of(weights, PROMPT, i, VOCABULARY) for i in range(SAMPLE_TOKENS)),
    )


@dataclass
class Observer:
    """Looks at one engine's claims, again and again, and writes down what is wrong about them."""

    engine_id: str
    channel: grpc.aio.Channel
    ledger: Ledger
    wrong: list[str] = field(default_factory=list)
    samples: int = 0
    status: engine_pb2.EngineStatus | None = None
    """The last answer; None while there is none."""
    sampled: int = 0
    """The number of the last sample's version; 0 while there is none."""
    _life: str = ""
    _highest: int = 0
    _unset_for: str = ""
    """The update that it last had no version in."""

    async def watch(self) -> None:
        while True:
            self.status = await self._ask()
            if self.status is not None:
                self._judge(self.status)
            self.sampled = await self._sample() if self.status is not None and self.status.gate_open else 0
            await asyncio.sleep(EVERY_SECONDS)

    async def _ask(self) -> engine_pb2.EngineStatus | None:
        stub: Any = lifecycle_pb2_grpc.LifecycleStub(self.channel)
        try:
            response = await stub.GetStatus(lifecycle_pb2.GetStatusRequest(run_id=RUN), timeout=LOOK_SECONDS)
        except grpc.aio.AioRpcError:
            return None
        assert isinstance(response.status, engine_pb2.EngineStatus)
        return response.status

    def _judge(self, status: engine_pb2.EngineStatus) -> None:
        if status.engine.incarnation != self._life:
            self._life, self._highest = status.engine.incarnation, 0
        if not status.HasField("applied"):
            self._unset_for = status.update.update_id
            if status.gate_open:
                self._say("an open gate without a version")
            return
        number = status.applied.number
        truth = self._truth(number)
        self._judge_install(status)
        if number < self._highest:
            self._say(f"version {number} after {self._highest} in one life")
        if truth is not None and status.content_digest != truth.content:
            self._say(f"version {number} with other content than it has")
        self._highest = max(number, self._highest)

    def _judge_install(self, status: engine_pb2.EngineStatus) -> None:
        """Of a status that claims a version: nothing is claimed from the first byte on until the install is done."""
        update = status.update
        if update.stage != engine_pb2.UPDATE_STAGE_INSTALLING:
            return
        if update.version == status.applied or update.update_id == self._unset_for:
            self._say(f"version {status.applied.number} while it installs {update.version.number}")

    async def _sample(self) -> int:
        """Tokens with their versions; 0: none, which a shut gate and a dead agent may give."""
        stub: Any = rollout_pb2_grpc.RolloutStub(self.channel)
        request = rollout_pb2.GenerateRequest(
            run_id=RUN,
            model="policy",
            prompt_token_ids=PROMPT,
            sampling=rollout_pb2.SamplingParams(max_tokens=SAMPLE_TOKENS),
        )
        request.wait.FromMilliseconds(1)
        tokens: list[int] = []
        finish = rollout_pb2.Finish()
        try:
            async for response in stub.Generate(request, timeout=LOOK_SECONDS):
                tokens += response.token_ids
                finish = response.finish
        except grpc.aio.AioRpcError:
            return 0
        return self._judge_sample(tokens, finish)

    def _judge_sample(self, tokens: list[int], finish: rollout_pb2.Finish) -> int:
        number = 0
        for span in finish.spans:
            number = span.version.number
            truth = self._truth(number)
            if truth is not None and tuple(tokens[span.start : span.end]) != truth.tokens[span.start : span.end]:
                self._say(f"tokens {tokens} that version {number} does not make")
        self.samples += bool(number)
        return number

    def _truth(self, number: int) -> Truth | None:
        step = self.ledger.step(number)
        if step is None:
            self._say(f"version {number}, which no ledger knows")
            return None
        return truth_of(step)

    def _say(self, what: str) -> None:
        self.wrong.append(f"{self.engine_id} claims {what}")


class Fleet:
    """The processes, their supervisor and their observers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = dict(zip(("coordinator", *ENGINES), _free_ports(1 + len(ENGINES)), strict=True))
        self.daemons: dict[str, Daemon] = {}
        self.channels = {name: open_channel(f"127.0.0.1:{port}") for name, port in self.ports.items()}
        self.ledger = Ledger(directory / "coordinator.log")
        self.observers = {e: Observer(e, self.channels[e], self.ledger) for e in ENGINES}
        self._watches: list[asyncio.Task[None]] = []
        self._ranks: dict[int, int] = {}
        self._rank_lines = LogTail(directory / "trainer.log")

    def start(self) -> None:
        address = f"127.0.0.1:{self.ports['coordinator']}"
        self._daemon(
            "coordinator", {"listen": address, "run_id": RUN, "heartbeat_seconds": 0.2, "lease_ttl_seconds": 2.0}
        )
        for engine_id, devices in (("e0", []), ("e1", [0, 1])):
            self._daemon(engine_id, _engine(engine_id, self.ports[engine_id], address, devices))
        script = json.dumps(asdict(Script(steps=1_000_000, pause_before_step=0.3, push_timeout=20.0)))
        settings = {"coordinator": address, "run_id": RUN, "trainer_id": "toy", "nproc_per_node": 2}
        settings |= {"max_restarts": 1000, "chunk_bytes": 65536, "stop_seconds": 5.0}
        self._daemon("trainer", settings, "--", str(TOY), script)
        self._watches += [asyncio.create_task(o.watch()) for o in self.observers.values()]

    async def close(self) -> None:
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        if "trainer" in self.daemons:
            await self.daemons.pop("trainer").close()  # it says goodbye to the others
        await asyncio.gather(*(daemon.close() for daemon in self.daemons.values()))
        for channel in self.channels.values():
            await channel.close()

    def pid_of(self, process: str) -> int:
        """Of a process as the matrix names it. Raises AssertionError where it does not live."""
        if process in ("leader", "rank"):
            return self._rank(0 if process == "leader" else 1)
        return self.daemons["e0" if process == "engine" else process].pid

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

    def _daemon(self, name: str, settings: dict[str, Any], *more: str) -> None:
        command = "engine" if name in ENGINES else name
        config = self.directory / f"{name}.toml"
        config.write_text(_toml(settings | {"state_dir": str(self.directory / f"{name}-state")}))
        self.daemons[name] = Daemon(name, [command, "--config", str(config), *more], self.directory)


@asynccontextmanager
async def running_fleet(directory: Path) -> AsyncIterator[Fleet]:
    """A started fleet in an empty directory, which is removed unless something failed inside."""
    directory.mkdir(parents=True)
    fleet = Fleet(directory)
    try:
        fleet.start()
        yield fleet
    finally:
        await fleet.close()
    shutil.rmtree(directory)


def _engine(engine_id: str, port: int, coordinator: str, devices: list[int]) -> dict[str, Any]:
    tensors = {name: list(shape) for name, shape in {**SHAPES, "tied": SHAPES["embed"]}.items()}
    return {
        "engine_id": engine_id,
        "coordinator": coordinator,
        "run_id": RUN,
        "listen": f"127.0.0.1:{port}",
        "backend": "memory",
        "cpu_devices": devices,
        "stream_idle_seconds": 5.0,
        "max_restarts": 1000,
        "memory": {"install_seconds": 0.1, "vocab_size": VOCABULARY, "tensors": tensors},
    }


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

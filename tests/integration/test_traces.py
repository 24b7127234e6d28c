"""Traces of a fleet whose every part is a process: one for each update, told to a real collector over OTLP.

And the same id in everybody's log.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.traces import update_trace
from controlplane.failpoints import DIRECTORY_VARIABLE
from controlplane.rpc.channels import open_channel
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN
from tests.support.otlp_collector import Collector, Received, collector
from tests.support.ports import free_port
from tests.support.toy_rank import SHAPES, Script
from weightplane.v1 import operator_pb2, operator_pb2_grpc

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "support" / "toy_rank.py"
PARTS = ("coordinator", "e0", "e1", "trainer")


@dataclass
class Processes:
    """What runs, by name; what each wrote is a file of that name."""

    directory: Path
    collector: str
    address: str
    running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(self, name: str, command: str, *words: str, **settings: Any) -> None:
        values = {"run_id": RUN, "state_dir": self.directory / "state", **settings}
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        points = self.directory / f"{name}-failpoints"
        points.mkdir()
        environment = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.collector,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}",
            "OMP_NUM_THREADS": "1",
            DIRECTORY_VARIABLE: str(points),
        }
        with (self.directory / f"{name}.log").open("wb") as log:
            self.running[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "controlplane.cli.main", command, *sets, *words),
                env=environment,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    async def start_fleet(self) -> None:
        await self.start("coordinator", "coordinator", listen=self.address, heartbeat_seconds=0.2)
        tensors = json.dumps({name: list(shape) for name, shape in {**SHAPES, "tied": SHAPES["embed"]}.items()})
        for name in ("e0", "e1"):
            config = self.directory / f"{name}.toml"
            shapes = "\n".join(f'"{key}" = {shape}' for key, shape in json.loads(tensors).items())
            config.write_text(f'engine_id = "{name}"\n[memory.tensors]\n{shapes}\n')
            await self.start(name, "engine", "--config", str(config), coordinator=self.address, backend="memory")

    async def train(self, script: Script) -> int:
        words = ["--", str(TOY), json.dumps(asdict(script))]
        settings = {"coordinator": self.address, "trainer_id": "trainer", "nproc_per_node": 2}
        await self.start("trainer", "trainer", *words, **settings)
        return await asyncio.wait_for(self.running["trainer"].wait(), 240)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    async def view(self) -> operator_pb2.FleetView:
        async with open_channel(self.address) as channel:
            stub: Any = operator_pb2_grpc.OperatorStub(channel)
            answer = await stub.GetFleet(operator_pb2.GetFleetRequest(), timeout=100, wait_for_ready=True)
            assert isinstance(answer.fleet, operator_pb2.FleetView)
            return answer.fleet

    async def end(self) -> None:
        for name in ("trainer", "e1", "e0", "coordinator"):
            process = self.running.get(name)
            if process is not None and process.returncode is None:
                process.terminate()
                await asyncio.wait_for(process.wait(), 60)


@asynccontextmanager
async def fleet(directory: Path, endpoint: str) -> AsyncIterator[Processes]:
    """A coordinator and two engines that know each other."""
    made = Processes(directory, endpoint, f"127.0.0.1:{free_port()}")
    try:
        await made.start_fleet()

        async def known() -> bool:
            return sum(engine.known for engine in (await made.view()).engines) == 2

        await eventually(known, within=120)
        yield made
    finally:
        await made.end()


def by_name(spans: list[Received]) -> dict[str, list[Received]]:
    return {name: [s for s in spans if s.name == name] for name in {s.name for s in spans}}


def parents_of(spans: list[Received]) -> Counter[tuple[str, str]]:
    """How often which span is below which."""
    names = {s.span_id: s.name for s in spans} | {"": "-"}
    return Counter((s.name, names.get(s.parent_id, "unknown")) for s in spans)


def check_processes(spans: list[Received]) -> None:
    told = {(s.service.removeprefix("weightplane-"), s.instance) for s in spans}
    ranks = {("rank", "trainer/rank-0"), ("rank", "trainer/rank-1")}
    assert {who for who in told if who[0] != "coordinator"} == {("engine", "e0"), ("engine", "e1"), *ranks} | {
        ("trainer", "trainer")
    }
    assert len({who for who in told if who[0] == "coordinator"}) == 1


def check_tree(spans: list[Received]) -> None:
    below = parents_of(spans)
    once = [("update", "-"), ("preparing", "update"), ("go", "update"), ("push", "update"), ("plan", "push")]
    twice = [("rank", "push"), ("gather", "rank"), ("export", "rank"), ("send", "push"), ("receive", "send")]
    twice += [("install", "send"), ("wait", "install"), ("quiesce", "install"), ("load", "install")]
    assert {pair: below.get(pair) for pair in once} == dict.fromkeys(once, 1)
    assert {pair: below.get(pair) for pair in twice} == dict.fromkeys(twice, 2)
    assert "unknown" not in {parent for _, parent in below}, below
    ends = {s.span_id: s for s in spans}
    for span in spans:
        above = ends.get(span.parent_id)
        assert span.end >= span.start
        assert above is None or span.name in ("push", "rank") or span.start >= above.start - 5_000_000, span


def check_failed(spans: list[Received]) -> None:
    """The engine whose install failed, and nobody else but those who waited for it."""
    named = by_name(spans)
    failed = {(s.name, s.attributes.get("weightplane.engine_id", s.instance)) for s in spans if s.error}
    assert failed == {("install", "e1"), ("send", "e1"), ("load", "e1")}
    [install] = [s for s in named["install"] if s.error]
    assert install.status.startswith("INSTALL_FAILED: ")
    assert install.attributes["error.type"] == "INSTALL_FAILED"
    assert "canary" not in {s.name for s in spans if s.parent_id == install.span_id}
    outcomes = {e["weightplane.engine_id"]: e for name, e in named["update"][0].events if name == "engine outcome"}
    assert (outcomes["e0"]["weightplane.stage"], outcomes["e1"]["weightplane.stage"]) == ("applied", "failed")
    assert outcomes["e1"]["error.type"] == "INSTALL_FAILED"


def check_attributes(spans: list[Received], update_id: str) -> None:
    named, size = by_name(spans), sum(4 * max(1, _size(shape)) if shape else 4 for shape in SHAPES.values())
    for name in ("update", "push", "send", "receive", "install", "rank"):
        assert {s.attributes["weightplane.update_id"] for s in named[name]} == {update_id}, name
    for name in ("update", "push", "send", "receive", "install"):
        assert {s.attributes["weightplane.version"] for s in named[name]} == {"1.2"}, name
        assert {s.attributes["weightplane.term"] for s in named[name]} == {1}, name
    for name in ("send", "receive"):
        assert {s.attributes["weightplane.transport"] for s in named[name]} == {"shared_memory"}
        assert {s.attributes["weightplane.bytes"] > size // 2 for s in named[name]} == {True}
    assert sorted(s.attributes["weightplane.rank"] for s in named["rank"]) == [0, 1]


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def check_logs(made: Processes, update_id: str) -> None:
    """One key, one id, in all of them; and the trace's id beside it."""
    trace = f"{update_trace(RUN, update_id):032x}"
    wanted = {
        "coordinator": {"record_written"},
        "e0": {"weights_applied"},
        "e1": {"weights_applied"},
        "trainer": {"push_began", "push_ended"},
    }
    for name, events in wanted.items():
        lines = [json.loads(line) for line in made.log(name).splitlines() if line.startswith("{")]
        mine = [line for line in lines if line.get("update_id") == update_id]
        assert events <= {line["event"] for line in mine}, name
        assert {line.get("trace_id") for line in mine} == {trace}, name
    exported = [line for line in made.log("trainer").splitlines() if "weights_exported" in line and update_id in line]
    assert len(exported) == 2, "both ranks"
    assert all(f"trace_id={trace}" in line for line in exported)


async def test_an_update_is_one_trace_over_all_processes_and_one_id_in_all_logs(tmp_path: Path) -> None:
    async with collector() as (received, endpoint):
        async with fleet(tmp_path, endpoint) as made:
            (tmp_path / "e1-failpoints" / "worker.install").write_text("raise")
            assert await made.train(Script(steps=2)) == 0, made.log("trainer")[-2000:]
            updates = {u.version.number: u.update_id for u in (await made.view()).updates}
        traces = {number: f"{update_trace(RUN, update_id):032x}" for number, update_id in updates.items()}
        _show(received, traces[2])
        failed, whole = received.of(traces[1]), received.of(traces[2])
        assert {s.trace_id for s in received.spans} == set(traces.values()), "nobody begins traces of its own"
        for spans in (failed, whole):
            check_processes(spans)
            check_tree(spans)
        assert parents_of(whole)[("canary", "install")] == 2
        assert [s for s in whole if s.error] == []
        check_failed(failed)
        check_attributes(whole, updates[2])
        check_logs(made, updates[2])
        failures = [json.loads(line) for line in made.log("e1").splitlines() if "install_failed" in line]
        assert [line["update_id"] for line in failures] == [updates[1]]


def _show(received: Collector, trace_id: str) -> None:
    """With -s, for people: docs/tracing.md has one."""
    print("\n" + received.tree(trace_id))

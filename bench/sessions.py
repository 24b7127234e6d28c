"""What 1,000 agents' sessions cost a coordinator, and how soon it routes to nobody who is gone.

Real engine agents with in-memory engines, 250 in a process, each with a connection and a session of its own, which
says its state once a second. The coordinator is a process, as it is started by people, its log and its ledger on disk.
After all are known and a while to settle, its CPU time is read over a span in which nothing else happens: no update,
nobody who looks at the fleet. Memory is its proportional set size at the end of that span. Beside it stands a server
that reads as many messages over grpc.aio and drops them, measured just before (`bench/bare_sessions.py`).

Meanwhile a client watches the routes of three further engines, of a model that they serve from their start. One is
killed (SIGKILL), one is stopped (SIGSTOP), and of one the network is cut: the relay before it is stopped, and neither
end hears of it. The clock runs from the signal until the client is told routes without that engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.engine_host import FROZEN, RUN
from bench.fleets import Fleet, fleet
from bench.harness import Row
from bench.processes import cpu_seconds, processes, pss_bytes
from controlplane.rpc.channels import open_channel
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

DEADLINE_SECONDS = 420
QUICK_DEADLINE_SECONDS = 110
AGENTS, QUICK_AGENTS = 1000, 100
SETTLE_SECONDS = 5.0
SPAN_SECONDS, QUICK_SPAN_SECONDS = 30.0, 8.0
GOAL_CORE_PERCENT = 20.0
GOAL_MIB = 300.0
GOAL_KILLED_SECONDS = 3.0
GOAL_SILENT_SECONDS = 15.0
GIVE_UP_SECONDS = 40.0
FLOOR_CLIENTS = 4
"""Processes, as for the agents."""
FIRST_WATCHED = 100_000
"""Number of the first engine whose routes are watched."""


def measure(quick: bool) -> list[Row]:
    agents = QUICK_AGENTS if quick else AGENTS
    span = QUICK_SPAN_SECONDS if quick else SPAN_SECONDS
    floor = None if quick else _floor(agents, span)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, fleet(Path(directory), agents) as found:
        time.sleep(SETTLE_SECONDS)
        cpu, began = cpu_seconds([found.coordinator]), time.monotonic()
        time.sleep(span)
        percent = 100 * (cpu_seconds([found.coordinator]) - cpu) / (time.monotonic() - began)
        mib = pss_bytes([found.coordinator]) / 2**20
        found.processes.check()
        if found.known() != agents:
            raise RuntimeError(f"{found.known()} of {agents} agents have a session")
        taken = asyncio.run(_unrouted(found))
    return [
        _cost(
            "CPU",
            f"CPU time over {span:.0f} s without an update; the floor: as many reports over grpc.aio, and nobody who "
            "makes anything of them",
            agents,
            percent,
            "% of a core",
            GOAL_CORE_PERCENT,
            floor,
        ),
        _cost("memory", "proportional set size after that", agents, mib, "MiB", GOAL_MIB),
        *(_soon(how, agents, taken) for how in taken),
    ]


def _floor(agents: int, span: float) -> float:
    """Of a server that drops what it reads. In percent of a core."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, processes(Path(directory)) as started:
        file, words = Path(directory) / "address", ("-m", "bench.bare_sessions")
        server = started.start("floor", *words, "serve", str(file))
        started.wait(file.exists, "the floor's start")
        for i in range(FLOOR_CLIENTS):
            started.start(f"clients-{i}", *words, "report", file.read_text(), str(agents // FLOOR_CLIENTS))
        time.sleep(3 * SETTLE_SECONDS)
        cpu, began = cpu_seconds([server]), time.monotonic()
        time.sleep(span)
        started.check()
        return 100 * (cpu_seconds([server]) - cpu) / (time.monotonic() - began)


def _cost(name: str, what: str, agents: int, value: float, unit: str, goal: float, floor: float | None = None) -> Row:
    return Row(
        name=f"{name}, {agents:,} sessions at 1 Hz",
        what=f"the coordinator's {what}",
        ours=value,
        other=floor,
        unit=unit,
        ratio=None if floor is None else value / floor,
        goal=f"<= {goal:g} {unit}" + (" at 1,000" if agents != AGENTS else ""),
        met=value <= goal,
    )


def _soon(how: str, agents: int, taken: dict[str, float]) -> Row:
    goal = GOAL_KILLED_SECONDS if how == "killed" else GOAL_SILENT_SECONDS
    return Row(
        name=f"{how} engine is unrouted, beside {agents:,} sessions",
        what="from the signal until a client is told routes without it",
        ours=taken[how],
        other=None,
        unit="s",
        ratio=None,
        goal=f"<= {goal:g} s",
        met=taken[how] <= goal,
        note="one run",
    )


# ---- who is gone --------------------------------------------------------------------------------


async def _unrouted(found: Fleet) -> dict[str, float]:
    """Seconds, by what was done to the engine."""
    started, directory = found.processes, found.processes.directory
    relay_file = directory / "relay-address"
    relay = started.start("relay", "-m", "bench.relay", found.address, str(relay_file))
    started.wait(relay_file.exists, "the relay's start")
    victims = {}
    for i, (how, address) in enumerate(
        {"killed": found.address, "stopped": found.address, "cut off": relay_file.read_text()}.items()
    ):
        number = FIRST_WATCHED + i
        words = ("-m", "bench.engine_host", address, str(directory / "engines"), str(number), "1", "frozen")
        victims[how] = (f"engine-{number}", started.start(f"watched-{i}", *words))
    async with _routes(found.address) as routes:
        await routes.until({name for name, _ in victims.values()})
        taken = {}
        for how, (name, pid) in victims.items():
            target, number = (relay, signal.SIGSTOP) if how == "cut off" else (pid, _SIGNALS[how])
            began = time.monotonic()
            os.kill(target, number)
            await routes.without(name)
            taken[how] = time.monotonic() - began
        for pid in (victims["stopped"][1], relay):  # so that they can be ended in order
            os.kill(pid, signal.SIGCONT)
    return taken


_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class _Routes:
    """What a client is told."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.engines: set[str] = set()

    async def until(self, names: set[str]) -> None:
        async with asyncio.timeout(GIVE_UP_SECONDS * 2):
            while not names <= self.engines:
                await self._next()

    async def without(self, name: str) -> None:
        async with asyncio.timeout(GIVE_UP_SECONDS):
            while name in self.engines:
                await self._next()

    async def _next(self) -> None:
        answer = await self._call.read()
        self.engines = {r.engine.engine_id for r in answer.routes}


@asynccontextmanager
async def _routes(address: str) -> AsyncIterator[_Routes]:
    async with open_channel(address) as channel:
        stub: Any = fleet_pb2_grpc.FleetStub(channel)
        yield _Routes(stub.WatchRoutes(fleet_pb2.WatchRoutesRequest(run_id=RUN, model=FROZEN)))

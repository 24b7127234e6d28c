"""L1, L3, L4, L6: an engine's health is its own progress, and nobody is sent to one that cannot serve.

Readiness (`grpc.health.v1`) is the gate and progress seen; liveness is the agent's loop, which an update never blocks.
L5 is attacked in `tests.integration.test_vllm_engine_failures` (real processes), `tests.unit.test_vllm_leftovers` and
the kill matrix.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from controlplane.core.errors import EngineDied
from controlplane.exit_codes import ExitCode
from engine_agent.daemon import agent
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.engine import EngineFacts
from engine_agent.life import progress
from engine_agent.memory.engine import MemoryEngine, MemorySettings
from tests.cases.cargo import refusals
from tests.cases.fleet import CaseFleet, case_fleet
from tests.cases.sessions import number_of
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN
from tests.support.writer import SHAPES, Weights
from weightplane.v1 import engine_pb2, lifecycle_pb2, lifecycle_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
AT_ONCE = 20.0
"""Limit of a question that nothing may hold up, on a busy machine."""


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[CaseFleet]:
    async with case_fleet(tmp_path) as running:
        yield running


async def health(fleet: CaseFleet, endpoint: str, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(fleet.channel(endpoint))
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=AT_ONCE)
    return int(response.status)


async def healthy(fleet: CaseFleet, endpoint: str, wanted: int) -> None:
    async def is_so() -> bool:
        return await health(fleet, endpoint) == wanted

    await eventually(is_so)


# ---- L1 -----------------------------------------------------------------------------------------


async def test_L1_a_replacement_is_not_ready_and_takes_no_traffic_before_it_has_weights(fleet: CaseFleet) -> None:
    await fleet.push(Weights())
    before = await fleet.engine("e0")
    routes = fleet.note_routes()
    await fleet.crash("e0")
    fleet.start_engine_at("e0", before.endpoint)
    after = await fleet.wait_for_a_life_after(before.status.engine.incarnation)
    assert (after.status.word, after.routable, number_of(after.status)) == ("empty", False, None)
    assert await health(fleet, after.endpoint) == NOT_SERVING
    assert await health(fleet, after.endpoint, "weightplane.v1.Rollout") == NOT_SERVING
    assert await health(fleet, after.endpoint, "weightplane.v1.WeightUpdate") == SERVING, "it waits for weights"
    with refusals("ENGINE_NOT_READY", "VERSION_UNAVAILABLE"):
        await fleet.generate("e0", 1, wait=0.1)
    await fleet.push(Weights())
    await healthy(fleet, after.endpoint, SERVING)
    await eventually(lambda: fleet.is_routable("e0"))
    told = {r.engine.incarnation: r.applied.number for answer in routes.told for r in answer.routes}
    assert told.get(after.status.engine.incarnation, 2) == 2, "it was routed to before its weights were in"


async def test_L1_a_replacement_that_comes_in_the_middle_of_a_push_waits_for_the_next(fleet: CaseFleet) -> None:
    await fleet.push(Weights())
    second, begun = Weights(), await fleet.begin(0)
    stream = fleet.stream(begun, "e0")
    await stream.until_ready(second)
    fleet.start_engine_at("e1")
    await fleet.wait_for_engines(2)
    await fleet.go(begun.update_id)
    await stream.commit(second)
    await fleet.decided(begun.update_id)
    await eventually(lambda: fleet.routable_are({"e0"}))
    assert number_of((await fleet.engine("e1")).status) is None
    await fleet.push(Weights())
    await eventually(lambda: fleet.routable_are({"e0", "e1"}))


# ---- L3 -----------------------------------------------------------------------------------------


async def test_L3_an_engine_that_hangs_in_its_shutdown_is_in_no_route_meanwhile(
    fleet: CaseFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routing is withdrawn by the coordinator, at the agent's first word, whatever the engine does then."""
    hangs, may_end = asyncio.Event(), asyncio.Event()

    async def shutdown(self: MemoryEngine) -> None:
        hangs.set()
        await may_end.wait()

    await fleet.push(Weights())
    await eventually(lambda: fleet.routable_are({"e0"}))
    engine = await fleet.engine("e0")
    monkeypatch.setattr(MemoryEngine, "shutdown", shutdown)
    stub: Any = lifecycle_pb2_grpc.LifecycleStub(fleet.channel(engine.endpoint))
    request = lifecycle_pb2.ShutdownRequest(run_id=RUN, incarnation=engine.status.engine.incarnation)
    await stub.Shutdown(request, timeout=AT_ONCE)
    await asyncio.wait_for(hangs.wait(), 60)
    await eventually(lambda: fleet.routable_are(set()))
    assert not fleet.tasks["e0"].done()
    assert await health(fleet, engine.endpoint) == NOT_SERVING
    may_end.set()


# ---- L4 -----------------------------------------------------------------------------------------


async def test_L4_an_engine_that_answers_no_round_trip_is_not_healthy_though_its_agent_and_processes_live(
    fleet: CaseFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(progress, "STALL_SECONDS", 0.2)
    answers = asyncio.Event()
    await fleet.push(Weights())
    engine = await fleet.engine("e0")
    await healthy(fleet, engine.endpoint, SERVING)

    async def probe(self: MemoryEngine) -> None:
        await answers.wait()

    monkeypatch.setattr(MemoryEngine, "probe", probe)
    await healthy(fleet, engine.endpoint, NOT_SERVING)
    await eventually(lambda: fleet.routable_are(set()))
    status = await fleet.status_at(engine.endpoint)  # its agent answers
    assert (status.word, status.gate_open, number_of(status)) == ("stalled", False, 1)
    answers.set()
    await healthy(fleet, engine.endpoint, SERVING)
    await eventually(lambda: fleet.routable_are({"e0"}))
    assert (await fleet.engine("e0")).status.engine == engine.status.engine, "it was only slow"


async def test_L4_health_answers_at_once_while_an_install_holds_the_engine_up_and_knows_of_it(
    fleet: CaseFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core is one thread, and answers no round trip during an install: that is no stall."""
    monkeypatch.setattr(progress, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(progress, "STALL_SECONDS", 0.1)
    await fleet.push(Weights())
    engine = await fleet.engine("e0")
    await healthy(fleet, engine.endpoint, SERVING)
    goes_on, held_up = asyncio.Event(), asyncio.Event()
    install, told = MemoryEngine.install, fleet.note_statuses(engine.endpoint)

    async def slow(self: MemoryEngine, staged: Any) -> Any:
        held_up.set()
        await goes_on.wait()
        return await install(self, staged)

    async def behind(self: MemoryEngine) -> None:
        if held_up.is_set():
            await goes_on.wait()

    monkeypatch.setattr(MemoryEngine, "install", slow)
    monkeypatch.setattr(MemoryEngine, "probe", behind)
    push = asyncio.create_task(fleet.push(Weights()))

    async def installing() -> bool:
        return (await fleet.status_at(engine.endpoint)).word == "installing"

    await eventually(installing)
    for _ in range(20):
        assert await health(fleet, engine.endpoint) == NOT_SERVING  # answered at once: nothing is served now
        status = await fleet.status_at(engine.endpoint)
        assert status.update.stage == engine_pb2.UPDATE_STAGE_INSTALLING
    goes_on.set()
    await push
    await healthy(fleet, engine.endpoint, SERVING)
    assert not [s.word for s in told.told if s.word == "stalled"]


async def test_L4_load_starves_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PROBE_SECONDS", 0.02)
    async with case_fleet(tmp_path, memory={"seconds_per_token": 0.001}) as fleet:
        await fleet.push(Weights())
        endpoint = (await fleet.engine("e0")).endpoint
        await healthy(fleet, endpoint, SERVING)
        samples = [asyncio.create_task(fleet.generate("e0", 100)) for _ in range(32)]
        while not all(s.done() for s in samples):
            assert await health(fleet, endpoint) == SERVING
            await asyncio.sleep(0)
        assert {len(tokens) for tokens, _, _ in await asyncio.gather(*samples)} == {100}


# ---- deaths in a row ----------------------------------------------------------------------------


@pytest.mark.parametrize("dies", ["start", "probe"])
async def test_an_engine_that_dies_again_and_again_is_given_up_with_a_code_of_its_own(
    fleet: CaseFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """At its start, or as soon as it is there: a supervisor, and no loop in the agent, decides what comes then."""
    monkeypatch.setattr(progress, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(agent, "RESTART_WAIT_SECONDS", (0.02, 0.02))
    deaths: list[str] = []

    async def die(self: MemoryEngine) -> Any:
        if self._engine_id != "e9":
            return None
        deaths.append(self._engine_id)
        raise EngineDied(engine_id="e9", cause="out of memory")

    monkeypatch.setattr(MemoryEngine, dies, die)
    settings = replace(_settings(fleet, tmp_path, "e9", "127.0.0.1:0"), max_restarts=2)
    with capture_logs() as logs:
        assert await asyncio.wait_for(run_engine(settings), 60) == ExitCode.ENGINE_FAILED
    assert len(deaths) == 3, "its first life, and two more"
    (last,) = [line for line in logs if line["event"] == "engine_died_too_often"]
    assert (last["log_level"], last["in_a_row"]) == ("error", 3)
    view = await fleet.find_engine("e9")
    assert (view is None) == (dies == "start"), "what never lived was never spoken of"
    assert view is None or not view.routable


# ---- L6 -----------------------------------------------------------------------------------------


async def test_L6_a_port_that_is_taken_ends_the_agent_before_it_starts_an_engine(
    fleet: CaseFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    async def start(self: MemoryEngine) -> EngineFacts:
        started.append(self._engine_id)
        raise AssertionError("not reached")

    monkeypatch.setattr(MemoryEngine, "start", start)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = _settings(fleet, tmp_path, "e9", listen)
        assert await asyncio.wait_for(run_engine(settings), 60) == ExitCode.PORT_IN_USE
    assert started == []
    assert await fleet.find_engine("e9") is None


async def test_L6_what_is_published_is_the_port_that_was_bound_and_it_is_bound_while_the_engine_starts(
    fleet: CaseFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, start, bound = asyncio.Event(), MemoryEngine.start, asyncio.Queue[str]()

    async def slow(self: MemoryEngine) -> EngineFacts:
        await goes_on.wait()
        return await start(self)

    async def noted(*arguments: Any) -> Any:
        from controlplane.rpc.server import start_server

        server = await start_server(*arguments)
        bound.put_nowait(server.address)
        return server

    monkeypatch.setattr(MemoryEngine, "start", slow)
    monkeypatch.setattr("engine_agent.daemon.agent.start_server", noted)
    fleet._start("e9", run_engine, _settings(fleet, tmp_path, "e9", "127.0.0.1:0"))
    address = await asyncio.wait_for(bound.get(), 60)
    assert await health(fleet, address) == NOT_SERVING  # it is there, and says so
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))
    assert await fleet.find_engine("e9") is None  # nobody was told before the engine was there
    goes_on.set()
    await fleet.wait_for_engines(2)
    assert (await fleet.engine("e9")).endpoint == address


def _settings(fleet: CaseFleet, directory: Path, engine_id: str, listen: str) -> EngineSettings:
    return EngineSettings(
        engine_id=engine_id,
        coordinator=fleet.address,
        run_id=RUN,
        listen=listen,
        state_dir=directory / "engines",
        backend="memory",
        memory=MemorySettings(tensors=SHAPES),
    )

"""Engines that die, hang or never start: the port says so in time, and nothing is left running."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from controlplane.core.engine_state import EngineState, HoldKind
from controlplane.core.errors import EngineDied, InstallFailed, InstallTimedOut
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.engine import EngineFacts, StagedWeights
from engine_agent.life import progress
from engine_agent.life.engine_life import EngineLife
from engine_agent.life.remembered import Memory
from engine_agent.vllm.engine import VllmEngine, VllmSettings
from engine_agent.vllm.leftovers import Leftovers
from tests.support import vllm_agent_process
from tests.support.eventually import eventually, eventually_blocking
from tests.support.staging import stage
from tests.support.tiny_engine import read_state, tiny_settings
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(240)]

PROMPT = [5, 6, 7, 8, 9]
SAMPLING = SamplingSettings(max_tokens=150, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def settings(model: Path) -> VllmSettings:
    return tiny_settings(model, install_timeout_seconds=5.0)


@pytest.fixture
def failpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path / "worker.install"


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before, segments = {p.pid for p in psutil.Process().children(recursive=True)}, orphaned_segments()
    yield
    children = psutil.Process().children(recursive=True)
    assert [p.cmdline() for p in children if p.pid not in before and "resource_tracker" not in str(p.cmdline())] == []
    eventually_blocking(lambda: orphaned_segments() <= segments)


@pytest.fixture
async def engine(settings: VllmSettings, failpoint: Path, nothing_left: None) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(settings, "engine-0")
    yield engine
    await engine.shutdown()


async def consume(engine: VllmEngine, name: str) -> list[int]:
    return [t async for delta in engine.generate(name, PROMPT, SAMPLING) for t in delta.token_ids]


def orphaned_segments() -> set[str]:
    """vLLM's shared memory that no living process maps (others may run vLLM on this machine)."""
    mapped = "".join(_maps(pid) for pid in psutil.pids())
    return {e.name for e in os.scandir("/dev/shm") if e.name.startswith(("psm_", "vllm_")) and e.name not in mapped}


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def gone(pids: tuple[int, ...]) -> bool:
    return not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids)


@pytest.mark.parametrize("victim", [0, 1], ids=["core", "worker"])
async def test_a_killed_process_ends_every_wait_and_shutdown_leaves_nothing(engine: VllmEngine, victim: int) -> None:
    facts = await engine.start()
    core, worker = sorted(facts.pids, key=lambda p: psutil.Process(p).create_time())
    waiting = asyncio.create_task(consume(engine, "victim"))
    await engine.quiesce()
    os.kill((core, worker)[victim], signal.SIGKILL)
    for wait in (waiting, engine.probe(), engine.resume(), engine.quiesce(), consume(engine, "late")):
        with pytest.raises(EngineDied):
            await asyncio.wait_for(wait, 20)
    await engine.shutdown()
    assert gone(facts.pids)


async def test_L4_a_core_that_hangs_shuts_the_gate_though_its_processes_live_and_opens_it_when_it_goes_on(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(progress, "STALL_SECONDS", 2.0)
    state = EngineState(RunId("run"), ModelName("policy"), EngineId("engine-0"), Incarnation("i"))
    life = EngineLife(state, engine, Memory(tmp_path / "e0.json", "run", "policy"))
    await life.start()
    assert life.facts is not None
    await eventually(lambda: not life.gate.runs)  # the gate of a fresh engine is shut, which is a round trip too
    core = min(life.facts.pids, key=lambda p: psutil.Process(p).create_time())
    os.kill(core, signal.SIGSTOP)
    try:
        await eventually(lambda: life.core.state.held_by(HoldKind.STALLED) == "engine-0")
        assert not gone(life.facts.pids)
        assert not life.died.done()
    finally:
        os.kill(core, signal.SIGCONT)
    await eventually(lambda: life.core.state.held_by(HoldKind.STALLED) is None)
    await engine.resume()
    assert len(await consume(engine, "after")) == SAMPLING.max_tokens
    await life.end("the test is over")


async def test_an_install_past_its_deadline_ends_the_engine(
    engine: VllmEngine, settings: VllmSettings, failpoint: Path
) -> None:
    """INV-4: its outcome is unknown, so what the workers hold is given up."""
    facts = await engine.start()
    failpoint.write_text("sleep=60 after=3")
    await engine.quiesce()
    started = time.monotonic()
    with stage(read_state(settings.model), "1") as staged, pytest.raises(InstallTimedOut):
        await engine.install(staged)
    assert time.monotonic() - started < settings.install_timeout_seconds + 5
    assert gone(facts.pids)
    with pytest.raises(EngineDied):
        await engine.probe()


async def test_a_start_past_its_deadline_leaves_nothing(settings: VllmSettings, nothing_left: None) -> None:
    engine = VllmEngine(replace(settings, start_timeout_seconds=3.0), "engine-late")
    with pytest.raises(EngineDied, match=r"no engine core within 3\.0 s"):
        await engine.start()
    await engine.shutdown()


async def test_a_start_that_is_cancelled_leaves_nothing(settings: VllmSettings, nothing_left: None) -> None:
    engine = VllmEngine(settings, "engine-cancelled")
    starting = asyncio.create_task(engine.start())
    await eventually(lambda: any("spawn_main" in str(p.cmdline()) for p in psutil.Process().children()), within=180)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await engine.shutdown()


async def test_an_engine_that_cannot_start_says_what_its_log_said(
    settings: VllmSettings, tmp_path: Path, nothing_left: None
) -> None:
    import torch
    from safetensors.torch import save_file

    model = make_tiny_model(tmp_path / "misshapen", seed=0)
    state = read_state(model)
    state["model.norm.weight"] = torch.zeros(64)
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    engine = VllmEngine(replace(settings, model=model), "engine-misshapen")
    with (
        capture_logs() as logged,
        pytest.raises(EngineDied, match=r"(?s)the engine's last errors:.*\[64\].* into parameter .*\[128\]"),
    ):
        await engine.start()
    await engine.shutdown()
    [lines] = [entry["last_log_lines"] for entry in logged if entry["event"] == "engine_not_started"]
    assert 20 < len(lines) <= 100
    assert any("INFO" in line for line in lines)  # what it did before, not its errors only


async def test_the_event_loop_goes_on_while_an_engine_starts(engine: VllmEngine) -> None:
    """Heartbeats run in it."""
    gaps: list[float] = []

    async def beat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - before)

    beating = asyncio.create_task(beat())
    await engine.start()
    beating.cancel()
    assert max(gaps) < 2.0


def test_L5_an_agent_that_is_killed_leaves_no_process_and_the_next_start_no_memory(model: Path, tmp_path: Path) -> None:
    """Children end by themselves; what they cannot take along (vLLM's shared memory) is swept by whoever comes next."""
    before, note = orphaned_segments(), tmp_path / "e0.processes.json"
    command = [sys.executable, "-m", vllm_agent_process.__name__, str(model), str(note)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as agent:
        assert agent.stdout is not None
        line = next(line for line in agent.stdout if line.startswith(vllm_agent_process.MARK))
        pids = tuple(json.loads(line.removeprefix(vllm_agent_process.MARK)))
        assert len(pids) == 2
        assert not gone(pids)
        noted = json.loads(note.read_text())
        assert {str(p) for p in pids} <= noted["lives"].keys()
        assert noted["segments"]
        agent.kill()
        eventually_blocking(lambda: gone(pids))
    Leftovers(note).sweep()
    assert not any(Path(segment).exists() for segment in noted["segments"])
    eventually_blocking(lambda: orphaned_segments() <= before)


class TestTwoWorkers:
    """One engine of two workers, each with chunks of its own device."""

    @pytest.fixture
    def settings(self, model: Path, settings: VllmSettings) -> VllmSettings:
        devices = ("device-a", "device-b")
        return replace(settings, model=model, tensor_parallel_size=2, device_uuids=devices, start_timeout_seconds=120)

    async def test_both_workers_install_or_neither(
        self, engine: VllmEngine, settings: VllmSettings, failpoint: Path
    ) -> None:
        facts = await engine.start()
        assert (facts.world_size, facts.device_uuids) == (2, ("device-a", "device-b"))
        state = read_state(settings.model)
        await engine.resume()
        original = await consume(engine, "original")
        await engine.quiesce()
        await self._refused_by_one_touches_neither(engine, facts, state)
        await engine.resume()
        assert await consume(engine, "still-original") == original
        await engine.quiesce()
        failpoint.write_text("raise after=5")  # fires in one of the two
        with stage(state, "3") as staged, pytest.raises(InstallFailed) as failure:
            await engine.install(self._for_both(staged))
        assert failure.value.touched
        with stage(state, "4") as staged:
            await engine.install(self._for_both(staged))
        await engine.canary()
        await engine.resume()
        assert await consume(engine, "healed") == original

    async def _refused_by_one_touches_neither(
        self, engine: VllmEngine, facts: EngineFacts, state: dict[str, Any]
    ) -> None:
        other = {name: t + 1 for name, t in state.items()}
        with stage(other, "2") as staged, pytest.raises(InstallFailed, match="worker 1") as failure:
            await engine.install(replace(staged, chunks={facts.device_uuids[0]: staged.chunks[""]}))
        assert not failure.value.touched

    def _for_both(self, staged: StagedWeights) -> StagedWeights:
        return replace(staged, chunks={"device-a": staged.chunks[""], "device-b": staged.chunks[""]})

"""The main job's failures on real vLLM: a leader killed between chunks, a trainer killed in an install, an install that
fails. Each time the fleet is whole again without a person, under a higher term."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from controlplane.exit_codes import ExitCode
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.vllm.settings import VllmSettings
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.tiny_model import make_tiny_model
from tests.support.toy_trainer import segments
from weightplane.v1 import engine_pb2, fleet_pb2

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]
ENGINES = ("e0", "e1")
START_SECONDS = 300.0


class Rig:
    """Two real engines, and a trainer in a process tree of its own."""

    def __init__(self, fleet: LocalFleet, model: Path, work: Path) -> None:
        self.fleet = fleet
        self.model = model
        self.work = work
        self.points = work / "failpoints"
        self.trainer: asyncio.subprocess.Process | None = None

    async def train(self, pushes: int) -> None:
        """Start `weightplane trainer`; it restarts its ranks once if they die."""
        arguments = ["-m", "controlplane.cli.main", "trainer", "--coordinator", self.fleet.address]
        settings = [f"run_id={RUN}", "nproc_per_node=2", "max_restarts=1", "chunk_bytes=65536"]
        for setting in [*settings, f"state_dir={self.work / 'trainer'}"]:
            arguments += ["--set", setting]
        script = ["-m", "tests.support.checkpoint_rank", str(self.model), str(self.work), str(pushes)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | {"OMP_NUM_THREADS": "1"}
        self.trainer = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, "--", *script, env=environment, start_new_session=True
        )

    def kill_trainer(self) -> None:
        """The agent, its launcher and its ranks, at once."""
        if self.trainer is not None and self.trainer.returncode is None:
            os.killpg(self.trainer.pid, signal.SIGKILL)

    async def end_trainer(self) -> int:
        """In order. Its exit code."""
        assert self.trainer is not None
        self.trainer.terminate()
        return await asyncio.wait_for(self.trainer.wait(), 60)

    async def pushed(self, number: int) -> None:
        """Push `number` was reported to the trainer's rank 0."""
        await eventually(lambda: (self.work / f"pushed-{number}").exists(), within=120)

    def go_on(self, number: int) -> None:
        (self.work / f"next-{number}").touch()

    async def applied(self) -> list[int | None]:
        return [await self.fleet.applied(e) for e in ENGINES]

    async def speaks(self) -> Mapping[str, list[tuple[int, int, int]]]:
        """The spans of a short sample of each engine."""
        return {e: (await self.fleet.generate(e, 4, wait=10))[1] for e in ENGINES}

    async def term(self) -> int:
        return (await self.fleet.view()).state.models[0].term

    async def whole(self) -> bool:
        """Both engines serve what the fleet serves."""
        view = await self.fleet.view()
        return len(view.engines) == 2 and all(e.routable for e in view.engines)


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    model = make_tiny_model(tmp_path / "model", 0)
    (tmp_path / "failpoints").mkdir()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "failpoints"))
    fleet = LocalFleet(tmp_path)
    rig = Rig(fleet, model, tmp_path)
    try:
        await fleet.start_coordinator(lease_ttl_seconds=20.0)
        for number, engine_id in enumerate(ENGINES):
            vllm = VllmSettings(model=model, dtype="float32", max_model_len=128, kv_cache_memory_bytes=32 << 20)
            settings = EngineSettings(
                engine_id=engine_id,
                coordinator=fleet.address,
                run_id=RUN,
                state_dir=tmp_path / "engines",
                vllm=vllm,
                cpu_devices=(number,),
            )
            fleet._start(engine_id, run_engine, settings)
            await eventually(lambda n=number: _known(fleet, n + 1), within=START_SECONDS)  # type: ignore[misc]
        yield rig
    finally:
        rig.kill_trainer()
        await fleet.close()


async def _known(fleet: LocalFleet, count: int) -> bool:
    return sum(e.known for e in (await fleet.view()).engines) == count


async def test_killed_leaders_and_failed_installs_heal_without_a_person(rig: Rig) -> None:
    await rig.train(pushes=5)
    await rig.pushed(1)
    await eventually(rig.whole)
    await _a_leader_killed_between_two_chunks(rig)
    await _a_failure_inside_an_install(rig)
    await _a_trainer_killed_after_its_commit_frames(rig)
    assert await rig.end_trainer() == ExitCode.INTERRUPTED
    assert segments() == []


async def _a_leader_killed_between_two_chunks(rig: Rig) -> None:
    (rig.points / "rank.between_chunks").write_text("kill after=2")
    rig.go_on(1)
    await eventually(lambda: not (rig.points / "rank.between_chunks").exists(), within=60)
    assert await rig.applied() == [1, 1]
    assert await rig.speaks() == {e: [(1, 0, 4)] for e in ENGINES}
    await rig.pushed(2)  # the restarted ranks, under the next term, without a person
    assert await rig.term() == 2
    await eventually(rig.whole)


async def _a_failure_inside_an_install(rig: Rig) -> None:
    (rig.points / "worker.install").write_text("raise after=3")
    rig.go_on(2)
    await rig.pushed(3)
    state = (await rig.fleet.view()).updates[0]
    assert state.phase == fleet_pb2.UPDATE_PHASE_DEGRADED
    stages = sorted(o.stage for o in state.engines)
    assert stages == [engine_pb2.UPDATE_STAGE_APPLIED, engine_pb2.UPDATE_STAGE_FAILED]
    words = sorted([(await rig.fleet.status(e)).word for e in ENGINES])
    assert words == ["poisoned", "serving"]
    rig.go_on(3)
    await rig.pushed(4)
    await eventually(rig.whole)


async def _a_trainer_killed_after_its_commit_frames(rig: Rig) -> None:
    for engine in ENGINES:
        assert (await rig.fleet.status(engine)).word == "serving"
    (rig.points / "worker.install").write_text("sleep=3")
    rig.go_on(4)

    async def one_installs() -> bool:
        return "installing" in [(await rig.fleet.status(e)).word for e in ENGINES]

    await eventually(one_installs, within=60)
    rig.kill_trainer()
    before = (await rig.fleet.view()).updates[0]
    state = await rig.fleet.decided(before.update_id)
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    assert await rig.applied() == [state.version.number] * 2
    await eventually(rig.whole)
    term = await rig.term()
    await rig.train(pushes=6)  # a new run: the agent's own notes prove that the old ranks are dead
    await rig.pushed(5)
    assert await rig.term() == term + 1
    await eventually(rig.whole)

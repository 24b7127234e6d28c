"""`run_trainer`: ranks under torch's launcher, restarts, fences and signals; and ranks that bring their own agent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from controlplane.exit_codes import ExitCode
from controlplane.failpoints import DIRECTORY_VARIABLE
from controlplane.processes import descendants, start_time
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.toy_rank import Script
from tests.support.toy_trainer import fleet_for_toys, segments

pytestmark = pytest.mark.timeout(400)

TOY = Path(__file__).parents[1] / "support" / "toy_rank.py"
ROOT = Path(__file__).parents[2]


class Trainer:
    """`run_trainer` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(
        cls, fleet: LocalFleet, script: Script, *, max_restarts: int = 1, failpoints: Path | None = None
    ) -> Trainer:
        code = (
            "import asyncio, sys; from pathlib import Path;"
            "from trainer_agent.agent import TrainerSettings, run_trainer;"
            f"settings = TrainerSettings(coordinator={fleet.address!r}, nproc_per_node=2,"
            f" max_restarts={max_restarts}, stop_seconds=15.0, state_dir=Path({str(fleet.directory / 'trainer')!r}));"
            f"sys.exit(asyncio.run(run_trainer(settings, [{str(TOY)!r}, {json.dumps(asdict(script))!r}])))"
        )
        return cls(await _start(["-c", code], {DIRECTORY_VARIABLE: str(failpoints)} if failpoints else {}))

    async def finish(self, within: float = 200.0) -> tuple[int, list[dict[str, Any]]]:
        """Exit code, and what its ranks said."""
        out, _ = await asyncio.wait_for(self.process.communicate(), within)
        lines = []
        for line in out.decode().splitlines():
            with suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
        return self.process.returncode or 0, lines

    def below(self) -> list[int]:
        return descendants(self.process.pid)


async def _start(arguments: list[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    whole = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", **environment}
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, env=whole, cwd=ROOT
    )


def events(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == event]


async def until_served(fleet: LocalFleet) -> None:
    """The first push has arrived."""

    async def serves() -> bool:
        return await fleet.applied("e0") is not None

    await eventually(serves, within=180)


def alive(pids: list[int]) -> list[int]:
    return [p for p in pids if start_time(p) is not None]


async def test_ranks_are_started_push_and_end_with_code_ok(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet:
        trainer = await Trainer.start(fleet, Script(steps=2, init_group=True))
        code, lines = await trainer.finish()
        assert code == ExitCode.OK
        assert [(p["step"], p["version"]) for p in events(lines, "pushed") if p["rank"] == 1] == [(1, 1), (2, 2)]
        assert {j["run"] for j in events(lines, "joined")} == {RUN}
    assert segments() == []


async def test_a_killed_rank_is_restarted_with_the_others_and_gets_the_lease_back_at_once(tmp_path: Path) -> None:
    points = tmp_path / "failpoints"
    points.mkdir()
    (points / "rank.between_chunks").write_text("kill")
    async with fleet_for_toys(tmp_path, lease_ttl_seconds=60.0) as fleet:
        trainer = await Trainer.start(fleet, Script(steps=1, catch=False), failpoints=points)
        code, lines = await trainer.finish()
        assert code == ExitCode.OK
        assert sorted({j["term"] for j in events(lines, "joined")}) == [1, 2]
        assert len(events(lines, "pushed")) == 2
    assert segments() == []


async def test_a_trainer_that_fails_too_often_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet:
        trainer = await Trainer.start(fleet, Script(steps=1, spoil="raise", catch=False), max_restarts=1)
        code, lines = await trainer.finish()
        assert code == ExitCode.RANKS_FAILED
        assert len({j["pid"] for j in events(lines, "joined")}) == 4


async def test_a_fenced_trainer_is_never_restarted(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet:
        trainer = await Trainer.start(fleet, Script(steps=200, pause_before_step=0.2), max_restarts=5)
        await until_served(fleet)
        await fleet.take_lease(takeover=True, trainer_id="other")
        code, lines = await trainer.finish()
        assert code == ExitCode.FENCED
        assert len({j["pid"] for j in events(lines, "joined")}) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_ranks_segments_and_sockets(tmp_path: Path, number: signal.Signals) -> None:
    async with fleet_for_toys(tmp_path) as fleet:
        trainer = await Trainer.start(fleet, Script(steps=200, pause_before_step=0.2))
        await until_served(fleet)
        below = trainer.below()
        assert len(below) >= 3
        trainer.process.send_signal(number)
        code, _ = await trainer.finish(120)
        assert code == ExitCode.INTERRUPTED
        assert alive(below) == []
        assert segments() == []


async def test_ranks_die_with_an_agent_that_was_killed_and_its_successor_holds_the_lease_at_once(
    tmp_path: Path,
) -> None:
    async with fleet_for_toys(tmp_path, lease_ttl_seconds=60.0) as fleet:
        trainer = await Trainer.start(fleet, Script(steps=200, pause_before_step=0.2))
        await until_served(fleet)
        below = trainer.below()
        trainer.process.kill()
        await trainer.process.wait()
        await eventually(lambda: alive(below) == [], within=180)
        successor = await Trainer.start(fleet, Script(steps=1))
        code, lines = await successor.finish()
        assert code == ExitCode.OK
        assert {j["term"] for j in events(lines, "joined")} == {2}
    assert segments() == []


async def test_ranks_of_plain_torchrun_share_one_spawned_agent(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet:
        script = json.dumps(asdict(Script(steps=2, init_group=True, coordinator=fleet.address)))
        arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(TOY), script]
        trainer = Trainer(await _start(arguments, {}))
        code, lines = await trainer.finish()
        assert code == 0
        assert len(events(lines, "pushed")) == 4
        assert {j["term"] for j in events(lines, "joined")} == {1}
    assert segments() == []


async def test_ranks_that_cannot_tell_each_other_the_socket_are_told_what_to_do(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet:
        script = json.dumps(asdict(Script(coordinator=fleet.address)))
        environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        code, lines = await Trainer(await _start([str(TOY), script], environment)).finish()
        assert code == 0
        assert events(lines, "refused")[0]["reason"] == "INVALID_REQUEST"
        assert "weightplane trainer" in str(events(lines, "refused")[0]["text"])

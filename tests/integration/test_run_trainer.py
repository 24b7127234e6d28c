"""`run_trainer`: ranks under torch's launcher, restarts, fences and signals; and ranks that bring their own agent."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path

import pytest

from controlplane.exit_codes import ExitCode
from controlplane.processes import start_time
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.toy_rank import Script
from tests.support.toy_trainer import fleet_for_toys, segments
from tests.support.trainer_process import TOY, Trainer, events, start_python

pytestmark = pytest.mark.timeout(400)


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
        trainer = Trainer(await start_python(arguments, {}))
        code, lines = await trainer.finish()
        assert code == 0
        assert len(events(lines, "pushed")) == 4
        assert {j["term"] for j in events(lines, "joined")} == {1}
    assert segments() == []


async def test_ranks_that_cannot_tell_each_other_the_socket_are_told_what_to_do(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet:
        script = json.dumps(asdict(Script(coordinator=fleet.address)))
        environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        code, lines = await Trainer(await start_python([str(TOY), script], environment)).finish()
        assert code == 0
        assert events(lines, "refused")[0]["reason"] == "INVALID_REQUEST"
        assert "weightplane trainer" in str(events(lines, "refused")[0]["text"])

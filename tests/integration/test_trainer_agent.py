"""A trainer's ranks as real processes, against a real coordinator and engine agents with in-memory engines."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controlplane.devices import cpu_device_uuid
from controlplane.exit_codes import ExitCode
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN
from tests.support.obedient import ObedientRanks
from tests.support.toy_rank import SHAPES, Script
from tests.support.toy_trainer import (
    EngineProcess,
    RankProcess,
    fleet_for_toys,
    segments,
    start_engine,
    toy_trainer,
)
from weightplane.v1 import engine_pb2

pytestmark = pytest.mark.timeout(400)
PROMPTLY = 20.0
"""Seconds; what would notice otherwise (an operation of gloo, the end of a forked child) comes after 30."""


async def codes(ranks: list[RankProcess]) -> list[int]:
    return [await rank.code() for rank in ranks]


def reasons(rank: RankProcess) -> list[str]:
    return [line["reason"] for line in rank.said("failed")]


async def first_to_die(ranks: list[RankProcess]) -> tuple[RankProcess, RankProcess]:
    """The rank that the failpoint killed (whichever leads), and the other one."""
    waits = [asyncio.create_task(r.process.wait()) for r in ranks]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=100)
    victim = next(i for i, w in enumerate(waits) if w.done())
    assert waits[victim].result() == -signal.SIGKILL
    return ranks[victim], ranks[1 - victim]


async def first_to_stop(ranks: list[RankProcess]) -> int:
    """Process id of the rank that the failpoint stopped."""

    def stopped() -> list[int]:
        pids = [r.process.pid for r in ranks]
        found = [p for p in pids if Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[0] == "T"]
        assert found, "no rank stands still"
        return found

    return (await eventually(stopped, within=180))[0]


@pytest.mark.parametrize("transport", ["shared_memory", "inline", "broadcast"])
async def test_three_pushes_reach_every_engine_and_every_rank_hears_the_same(tmp_path: Path, transport: str) -> None:
    async with (
        fleet_for_toys(tmp_path, transport=transport) as fleet,
        toy_trainer(fleet.address, link_host="127.0.0.1") as trainer,
    ):
        ranks = await ObedientRanks.start(trainer)
        for n in (1, 2, 3):
            await fleet.settled()
            for heard in await ranks.all("push", step=n):
                assert (heard["version"], heard["status"]) == (n, "COMMITTED")
                assert heard["outcomes"] == {"e0": "APPLIED", "e1": "APPLIED"}
        assert await ranks.leave() == [0, 0]
        assert [await fleet.applied(e) for e in ("e0", "e1")] == [3, 3]
    await eventually(lambda: segments() == [])


async def test_the_ranks_of_a_colocated_engine_hand_over_one_buffer_for_each_device(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        start_engine(fleet, "tp2", device_uuids=(cpu_device_uuid(0), cpu_device_uuid(1)))
        await fleet.wait_for_engines(1)
        ranks = await trainer.start_ranks(Script(steps=3))
        assert await codes(ranks) == [0, 0]
        assert [p["outcomes"] for p in ranks[1].said("pushed")] == [{"tp2": "APPLIED"}] * 3
    await eventually(lambda: segments() == [])


async def test_a_slot_whose_ranks_differ_is_refused_and_nothing_is_applied(tmp_path: Path) -> None:
    async with (
        fleet_for_toys(tmp_path, engines=0, lease_ttl_seconds=60.0) as fleet,
        toy_trainer(fleet.address) as trainer,
    ):
        start_engine(fleet, "tp2", device_uuids=(cpu_device_uuid(0), cpu_device_uuid(1)))
        await fleet.wait_for_engines(1)
        ranks = await trainer.start_ranks(Script(steps=1, differ=True))
        assert await codes(ranks) == [0, 0]
        assert [reasons(r) for r in ranks] == [["SLOT_MISMATCH"]] * 2
        assert await fleet.applied("tp2") is None
    await eventually(lambda: segments() == [])


async def test_a_leader_killed_between_two_chunks_ends_the_push_for_all_and_leaves_nothing(
    tmp_path: Path, failpoint: Path
) -> None:
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        (failpoint / "rank.between_chunks").write_text("kill after=3")
        ranks = await trainer.start_ranks(Script(steps=1))
        victim, other = await first_to_die(ranks)
        killed = time.monotonic()
        assert await other.code() == 0
        assert time.monotonic() - killed < PROMPTLY
        assert reasons(other) == ["PEER_LOST"]
        assert f"rank {ranks.index(victim)} went away" in other.said("failed")[0]["text"]
        await eventually(lambda: segments() == [])
        assert await fleet.applied("e0") is None
        again = await trainer.start_ranks(Script(steps=1), WEIGHTPLANE_RESTART_COUNT="1")
        assert await codes(again) == [0, 0]
        assert again[0].said("joined")[0]["term"] == 2
        assert again[0].said("pushed")[0]["outcomes"] == {"e0": "APPLIED", "e1": "APPLIED"}


async def test_a_leader_killed_after_its_last_chunk_leaves_a_decided_update(tmp_path: Path, failpoint: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        (failpoint / "rank.after_push_end").write_text("kill")
        _, other = await first_to_die(await trainer.start_ranks(Script(steps=1)))
        assert await other.code() == 0
        applied = [await fleet.applied(e) for e in ("e0", "e1")]
        assert applied in ([1, 1], [None, None])
        assert bool(other.said("pushed")) is (applied == [1, 1])
        await eventually(lambda: segments() == [])


async def test_a_child_forked_in_the_push_does_not_hide_that_its_parent_died(tmp_path: Path, failpoint: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        (failpoint / "rank.between_chunks").write_text("kill after=8")
        _, other = await first_to_die(await trainer.start_ranks(Script(steps=1, fork_in_push=True)))
        killed = time.monotonic()
        await eventually(lambda: reasons(other) == ["PEER_LOST"])
        await eventually(lambda: segments() == [])
        assert time.monotonic() - killed < PROMPTLY


async def test_a_rank_stopped_in_the_push_for_longer_than_the_lease_goes_on(tmp_path: Path, failpoint: Path) -> None:
    async with fleet_for_toys(tmp_path, lease_ttl_seconds=1.0) as fleet, toy_trainer(fleet.address) as trainer:
        (failpoint / "rank.between_chunks").write_text("stop after=3")
        ranks = await trainer.start_ranks(Script(steps=2, push_timeout=120))
        stopped = await first_to_stop(ranks)
        await asyncio.sleep(2)
        os.kill(stopped, signal.SIGCONT)
        assert await codes(ranks) == [0, 0]
        assert [p["status"] for p in ranks[1].said("pushed")] == ["COMMITTED", "COMMITTED"]
        assert ranks[0].said("joined")[0]["term"] == 1


async def test_a_stream_that_went_idle_behind_a_stopped_rank_is_repeated(tmp_path: Path, failpoint: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        start_engine(fleet, "e0", stream_idle_seconds=1.0)
        await fleet.wait_for_engines(1)
        (failpoint / "rank.between_chunks").write_text("stop after=3")
        ranks = await trainer.start_ranks(Script(steps=1))
        stopped = await first_to_stop(ranks)

        async def gave_up() -> bool:
            return (await fleet.status("e0")).update.stage == engine_pb2.UPDATE_STAGE_ABORTED

        await eventually(gave_up)
        os.kill(stopped, signal.SIGCONT)
        assert await codes(ranks) == [0, 0]
        assert ranks[1].said("pushed")[0]["outcomes"] == {"e0": "APPLIED"}


async def test_a_fenced_trainer_ends_with_the_fenced_exit_code_on_every_rank(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await trainer.start_ranks(Script(steps=500, pause_before_step=0.2))
        await eventually(lambda: bool(ranks[0].said("pushed")), within=180)
        assert await fleet.take_lease(takeover=True, trainer_id="other") == 2
        assert await codes(ranks) == [ExitCode.FENCED] * 2
        assert reasons(ranks[0])[-1:] in (["STALE_TERM"], [])
        late = await trainer.start_ranks(Script(), WEIGHTPLANE_RESTART_COUNT="1")
        assert await codes(late) == [0, 0]
        assert [r.said("refused")[0]["reason"] for r in late] == ["STALE_TERM"] * 2
    await eventually(lambda: segments() == [])


@pytest.mark.parametrize(
    ("spoil", "said"), [("missing", "head"), ("extra", "more"), ("shape", "layer.0"), ("raise", "the source broke")]
)
async def test_a_source_that_deviates_from_its_metadata_fails_the_push_on_all_ranks(
    tmp_path: Path, spoil: str, said: str
) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await trainer.start_ranks(Script(steps=1, spoil=spoil))
        assert await codes(ranks) == [0, 0]
        expected = ["ValueError", "PEER_LOST"] if spoil == "raise" else ["LAYOUT_INVALID"] * 2
        assert [reasons(r) for r in ranks] == [[e] for e in expected]
        assert all(said in r.said("failed")[0]["text"] for r in ranks)
        assert await fleet.applied("e0") is None
    await eventually(lambda: segments() == [])


async def test_ranks_with_different_layouts_are_told_before_any_push(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await trainer.start_ranks(Script(layout_differs=True))
        assert await codes(ranks) == [0, 0]
        assert [r.said("refused")[0]["reason"] for r in ranks] == ["LAYOUT_INVALID"] * 2


async def test_a_rank_that_never_comes_is_named_at_the_deadline(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        rank = (await trainer.start_ranks(Script(join_timeout=3.0), world=1, WORLD_SIZE="2"))[0]
        assert await rank.code() == 0
        assert rank.said("refused")[0]["reason"] == "DEADLINE_EXCEEDED"
        assert "ranks [1]" in rank.said("refused")[0]["text"]


async def test_an_engine_of_another_shape_fails_the_push_once_with_its_own_words(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        start_engine(fleet, "e0", tensors=SHAPES | {"layer.1": (34, 7)})
        await fleet.wait_for_engines(1)
        ranks = await trainer.start_ranks(Script(steps=1))
        assert await codes(ranks) == [0, 0]
        assert [reasons(r) for r in ranks] == [["UPDATE_FAILED"]] * 2
        text = ranks[0].said("failed")[0]["text"]
        assert "SHAPE_MISMATCH" in text
        assert "layer.1" in text
        await eventually(lambda: segments() == [])


async def test_a_push_that_an_engine_broke_is_repeated_under_a_new_number(tmp_path: Path, failpoint: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        (failpoint / "engine.between_chunks").write_text("raise after=2")
        ranks = await trainer.start_ranks(Script(steps=1))
        assert await codes(ranks) == [0, 0]
        assert [r.said("pushed")[0]["version"] for r in ranks] == [2, 2]
        assert ranks[0].said("pushed")[0]["outcomes"] == {"e0": "APPLIED", "e1": "APPLIED"}


async def test_without_engines_a_push_is_refused_at_once(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await trainer.start_ranks(Script(steps=1))
        assert await codes(ranks) == [0, 0]
        assert [reasons(r) for r in ranks] == [["NO_ENGINES"]] * 2


async def test_a_restarted_coordinator_finds_the_same_trainer_with_the_same_term(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        assert [a["version"] for a in await ranks.all("push", step=1)] == [1, 1]
        await fleet.stop("coordinator")
        await fleet.start_coordinator()
        for number in (2, 3):
            assert [a["version"] for a in await ranks.all("push", step=number)] == [number] * 2
        assert await ranks.leave() == [0, 0]
        assert [v.term for v in (await fleet.view()).state.models[0].served] == [1]
        assert (await fleet.view()).coordinator_term == 2


async def test_a_lease_that_another_trainer_holds_is_named_with_its_holder(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=1, lease_ttl_seconds=200.0) as fleet:
        await fleet.take_lease(trainer_id="other")
        async with toy_trainer(fleet.address) as trainer:
            ranks = await trainer.start_ranks(Script(join_timeout=8.0))
            assert await codes(ranks) == [0, 0]
            assert [r.said("refused")[0]["reason"] for r in ranks] == ["LEASE_HELD"] * 2
            assert "other" in ranks[0].said("refused")[0]["text"]


async def test_memory_is_reused_after_a_commit(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        for step in (1, 2):
            await ranks.all("push", step=step)
        assert {s.rpartition("-")[2] for s in segments()} == {"0"}
        assert await ranks.leave() == [0, 0]


async def test_memory_that_an_engine_may_still_read_is_given_up(tmp_path: Path, failpoint: Path) -> None:
    """INV-12: the engine's agent died with the segment mapped; nobody can say that its workers are done."""
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        process = await EngineProcess.start(fleet)
        await fleet.wait_for_engines(1)
        (failpoint / "engine.between_chunks").write_text("kill after=5")
        ranks = await ObedientRanks.start(trainer, push_timeout=120.0)
        orders = [ranks.tell(rank, "push", step=1) for rank in range(2)]
        await process.died()
        process = await EngineProcess.start(fleet)
        assert [a["event"] for a in await ranks.answers(*orders)] == ["did", "did"]
        assert [s.rpartition("-")[2] for s in segments()] == ["1"]
        assert await ranks.leave() == [0, 0]
        await process.stop()


async def test_ranks_without_an_agent_spawn_one_and_leave_nothing_behind(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet:
        rank = await RankProcess.start(Script(steps=3, coordinator=fleet.address), {})
        assert await rank.code() == 0
        assert [p["version"] for p in rank.said("pushed")] == [1, 2, 3]
        assert rank.said("joined")[0]["run"] == RUN
    await eventually(lambda: segments() == [])
    await eventually(lambda: _sidecars() == [])


async def test_a_killed_rank_takes_its_spawned_agent_along(tmp_path: Path, failpoint: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet:
        (failpoint / "rank.between_chunks").write_text("kill")
        rank = await RankProcess.start(Script(coordinator=fleet.address), {})
        assert await rank.code() == -signal.SIGKILL
        await eventually(lambda: segments() == [])
        await eventually(lambda: _sidecars() == [])


def _sidecars() -> list[str]:
    """Those that this run of the tests brought about."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                line = (entry / "cmdline").read_bytes().decode()
                ours = f"WEIGHTPLANE_TEST_RUN={RUN}".encode() in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if ours and "trainer_agent.agent.sidecar" in line:
                found.append(line)
    return found


def test_a_rank_imports_no_grpc() -> None:
    code = "import sys, trainer_agent.rank; sys.exit(any(m.split('.')[0] == 'grpc' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

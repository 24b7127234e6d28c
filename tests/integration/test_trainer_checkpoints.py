"""Checkpoints of real pushes: a real coordinator, in-memory engines, a trainer agent with toy ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from controlplane.checkpoints import read_manifest
from controlplane.cli import engine_orders as orders
from controlplane.devices import cpu_device_uuid
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN
from tests.support.obedient import ObedientRanks
from tests.support.toy_rank import SHAPES, Script
from tests.support.toy_trainer import RankProcess, fleet_for_toys, start_engine, toy_trainer
from tests.support.trainer_checkpoints import checkpoints, contents, names, pushed_and_kept, pushed_contents
from trainer_agent.wire import RANK_SOCKET_VARIABLE

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("transport", ["shared_memory", "inline"])
async def test_each_commit_lies_on_disk_as_engines_hold_it_and_older_ones_go(tmp_path: Path, transport: str) -> None:
    root = tmp_path / "checkpoints"
    async with (
        fleet_for_toys(tmp_path, transport=transport) as fleet,
        toy_trainer(fleet.address, checkpoint_root=root, checkpoint_keep=2) as trainer,
    ):
        ranks = await ObedientRanks.start(trainer)
        assert [await pushed_and_kept(fleet, ranks, step) for step in (1, 2, 3)] == [1, 2, 3]
        await eventually(lambda: len(names(root)) == 2)
        known = await checkpoints(fleet)
        assert [c.version.number for c in known] == [3, 2]
        assert sorted(c.name for c in known) == names(root), "older ones are deleted"
        manifest = read_manifest(root, known[0].name)
        held = [(await fleet.status(e)).content_digest for e in ("e0", "e1")]
        assert held == [known[0].content_digest, manifest.content_digest]
        assert (manifest.run_id, manifest.model, manifest.step) == (RUN, "policy", 3)
        assert contents(root, known[0].name, manifest) == pushed_contents(3)
        assert known[0].byte_count == manifest.layout.byte_count
        assert known[0].tensor_count == len(SHAPES)


async def test_a_slot_of_two_ranks_gives_one_checkpoint_of_the_whole(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    async with (
        fleet_for_toys(tmp_path, engines=0) as fleet,
        toy_trainer(fleet.address, checkpoint_root=root) as trainer,
    ):
        start_engine(fleet, "tp2", device_uuids=(cpu_device_uuid(0), cpu_device_uuid(1)))
        await fleet.wait_for_engines(1)
        ranks = await trainer.start_ranks(Script(steps=1))
        assert [await r.code() for r in ranks] == [0, 0]
        [known] = await checkpoints(fleet)
        assert known.content_digest == (await fleet.status("tp2")).content_digest
        assert contents(root, known.name, read_manifest(root, known.name)) == pushed_contents(1)


async def test_one_that_an_engine_is_held_at_stays_until_it_is_released_and_others_go(tmp_path: Path) -> None:
    """The coordinator does not let it go (CHECKPOINT_IN_USE), and the trainer asks again with each commit."""
    root = tmp_path / "checkpoints"
    async with (
        fleet_for_toys(tmp_path) as fleet,
        toy_trainer(fleet.address, checkpoint_root=root, checkpoint_keep=1) as trainer,
    ):
        ranks = await ObedientRanks.start(trainer)
        await pushed_and_kept(fleet, ranks, 1)
        held = orders.Target(fleet.address, "e1", 5.0)
        await orders.keep(held, 1, "", 0.0)

        async def stay(*numbers: int) -> bool:
            known = {c.version.number for c in await checkpoints(fleet)}
            return known == set(numbers) and len(names(root)) == len(numbers)

        with capture_logs() as events:
            for step in (2, 3):
                await pushed_and_kept(fleet, ranks, step)
            await eventually(lambda: stay(1, 3))
        stays = [e["cause"] for e in events if e["event"] == "checkpoint_stays"]
        assert stays
        assert all("e1" in cause for cause in stays)
        await orders.release(held, 0.0)
        await pushed_and_kept(fleet, ranks, 4)
        await eventually(lambda: stay(4))


async def test_a_later_life_of_the_trainer_retires_what_the_first_one_wrote(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    async with fleet_for_toys(tmp_path, lease_ttl_seconds=1.0) as fleet:
        for _ in range(2):
            async with toy_trainer(fleet.address, checkpoint_root=root, checkpoint_keep=1) as trainer:
                ranks = await trainer.start_ranks(Script(steps=1))
                assert [await r.code() for r in ranks] == [0, 0]
        assert [c.version.number for c in await checkpoints(fleet)] == [2]
        assert len(names(root)) == 1


async def test_a_push_that_nobody_waited_for_is_kept_too(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    async with (
        fleet_for_toys(tmp_path) as fleet,
        toy_trainer(fleet.address, checkpoint_root=root) as trainer,
    ):
        ranks = await ObedientRanks.start(trainer)
        await ranks.all("push_async", step=1)
        assert await ranks.leave() == [0, 0]
        [known] = await checkpoints(fleet)
        assert contents(root, known.name, read_manifest(root, known.name)) == pushed_contents(1)


async def test_ranks_that_bring_their_own_agent_say_with_which_settings(tmp_path: Path) -> None:
    root, config = tmp_path / "checkpoints", tmp_path / "trainer.toml"
    config.write_text('checkpoint_root = "checkpoints"\n')
    async with fleet_for_toys(tmp_path, engines=1) as fleet:
        rank = await RankProcess.start(Script(coordinator=fleet.address, agent_config=str(config)), {})
        assert await rank.code() == 0
        assert [c.name for c in await checkpoints(fleet)] == names(root)
        assert len(names(root)) == 1, "the agent ends after what it writes"
        socket = {RANK_SOCKET_VARIABLE: str(tmp_path / "ranks.sock")}
        given = await RankProcess.start(Script(coordinator=fleet.address, agent_config=str(config)), socket)
        assert await given.code() == 0
        assert "an agent was started before its ranks" in given.said("refused")[0]["text"]


async def test_a_late_engine_holds_what_the_trainer_kept_though_no_trainer_lives(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    async with fleet_for_toys(tmp_path) as fleet:
        async with toy_trainer(fleet.address, checkpoint_root=root) as trainer:
            ranks = await ObedientRanks.start(trainer)
            assert [await pushed_and_kept(fleet, ranks, step) for step in (1, 2)] == [1, 2]
            assert await ranks.leave() == [0, 0]
        start_engine(fleet, "late", checkpoint_root=root)

        async def serves() -> bool:
            return {e.status.engine.engine_id for e in (await fleet.view()).engines if e.routable} >= {"late"}

        await eventually(serves)
        statuses = [await fleet.status(e) for e in ("late", "e0")]
        assert [s.applied.number for s in statuses] == [2, 2]
        assert statuses[0].content_digest == statuses[1].content_digest


async def test_every_third_commit_is_kept_from_the_first_on(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    async with (
        fleet_for_toys(tmp_path, engines=1) as fleet,
        toy_trainer(fleet.address, checkpoint_root=root, checkpoint_every=3, checkpoint_keep=9) as trainer,
    ):
        ranks = await ObedientRanks.start(trainer)
        for step in range(1, 6):
            if step in (1, 4):
                await pushed_and_kept(fleet, ranks, step)
            else:
                await ranks.all("push", step=step)
        assert await ranks.leave() == [0, 0]
        assert [c.version.number for c in await checkpoints(fleet)] == [4, 1]


async def test_checkpoints_outlive_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    async with (
        fleet_for_toys(tmp_path) as fleet,
        toy_trainer(fleet.address, checkpoint_root=root, checkpoint_keep=2) as trainer,
    ):
        ranks = await ObedientRanks.start(trainer)
        await pushed_and_kept(fleet, ranks, 1)
        await fleet.stop("coordinator")
        await fleet.start_coordinator()
        assert [c.version.number for c in await checkpoints(fleet)] == [1]
        assert [await pushed_and_kept(fleet, ranks, step) for step in (2, 3)] == [2, 3]
        await eventually(lambda: len(names(root)) == 2)
        assert [c.version.number for c in await checkpoints(fleet)] == [3, 2]

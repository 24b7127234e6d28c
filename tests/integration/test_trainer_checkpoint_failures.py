"""Checkpoints that cannot be written: a disk that hangs or is full, no root, a fence, a kill. Pushes go on."""

from __future__ import annotations

import asyncio
import resource
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from controlplane.checkpoints import CheckpointManifest, read_manifest
from controlplane.exit_codes import ExitCode
from controlplane.failpoints import DIRECTORY_VARIABLE
from tests.support.eventually import eventually
from tests.support.limited_trainer import LimitedTrainer
from tests.support.obedient import ObedientRanks
from tests.support.toy_rank import Script
from tests.support.toy_trainer import fleet_for_toys, toy_trainer
from tests.support.trainer_checkpoints import checkpoints, contents, names, pushed_and_kept, pushed_contents
from trainer_agent.agent import checkpoints as keeping
from trainer_agent.agent.checkpoint_files import Whole, write
from trainer_agent.agent.frames import SegmentReader

pytestmark = pytest.mark.timeout(240)


async def test_inv_12_pushes_go_on_while_a_disk_hangs_and_what_it_writes_is_its_own_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks write their next weights elsewhere; of those pushes nothing is kept, and then again."""
    root, disk = tmp_path / "checkpoints", threading.Event()

    def hangs(root: Path, version: Whole, reader: SegmentReader, stop: threading.Event) -> CheckpointManifest | None:
        disk.wait(60)
        return write(root, version, reader, stop)

    monkeypatch.setattr(keeping, "write", hangs)
    async with (
        fleet_for_toys(tmp_path) as fleet,
        toy_trainer(fleet.address, checkpoint_root=root) as trainer,
    ):
        ranks = await ObedientRanks.start(trainer)
        for step in (1, 2, 3):
            assert [a["version"] for a in await ranks.all("push", step=step)] == [step] * 2
        assert await checkpoints(fleet) == []
        disk.set()
        keeper = trainer.agent._checkpoints
        assert keeper is not None
        await eventually(lambda: keeper.idle)
        [known] = await checkpoints(fleet)
        assert known.version.number == 1
        assert contents(root, known.name, read_manifest(root, known.name)) == pushed_contents(1)
        assert await pushed_and_kept(fleet, ranks, 4) == 4


def failures(logs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [(line["step"], line["version"]) for line in logs if line["event"] == "checkpoint_failed"]


@pytest.mark.parametrize("way", ["a file", "no permission"])
async def test_a_root_that_cannot_be_written_costs_an_event_and_no_push(tmp_path: Path, way: str) -> None:
    root = tmp_path / "checkpoints"
    if way == "a file":
        root.write_text("not a directory")
    else:
        root = Path("/proc/weightplane-checkpoints")
    with capture_logs() as logs:
        async with (
            fleet_for_toys(tmp_path) as fleet,
            toy_trainer(fleet.address, checkpoint_root=root) as trainer,
        ):
            ranks = await ObedientRanks.start(trainer)
            for step in (1, 2):
                assert [a["status"] for a in await ranks.all("push", step=step)] == ["COMMITTED"] * 2
                await eventually(lambda: len(failures(logs)) == step)  # noqa: B023
            assert await checkpoints(fleet) == []
    assert failures(logs) == [("write", "1.1"), ("write", "1.2")]


async def test_inv_7_a_trainer_that_is_fenced_while_it_writes_publishes_nothing_and_ends_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The push was committed, and says so; the next word is the fence."""
    root = tmp_path / "checkpoints"
    async with (
        fleet_for_toys(tmp_path) as fleet,
        toy_trainer(fleet.address, checkpoint_root=root) as trainer,
    ):
        fenced, loop = threading.Event(), asyncio.get_running_loop()

        def fences(
            root: Path, version: Whole, reader: SegmentReader, stop: threading.Event
        ) -> CheckpointManifest | None:
            taken = asyncio.run_coroutine_threadsafe(fleet.take_lease(takeover=True, trainer_id="other"), loop)
            assert taken.result(30) == 2
            fenced.set()
            return write(root, version, reader, stop)

        monkeypatch.setattr(keeping, "write", fences)
        ranks = await ObedientRanks.start(trainer)
        assert [a["status"] for a in await ranks.all("push", step=1)] == ["COMMITTED"] * 2
        await eventually(fenced.is_set)
        await eventually(trainer.agent.refused_event.is_set)
        assert [a["reason"] for a in await ranks.all("push", step=2)] == ["STALE_TERM"] * 2
        assert [await r.code() for r in ranks.ranks] == [ExitCode.FENCED] * 2
        assert await checkpoints(fleet) == []
        await eventually(lambda: names(root) == [])


async def test_a_full_disk_costs_an_event_and_no_push_and_passes(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    async with fleet_for_toys(tmp_path) as fleet:
        trainer = await LimitedTrainer.start(fleet, Script(steps=8, pause_before_step=1.0), root)
        await eventually(lambda: bool(trainer.said("checkpoint_published")))
        trainer.limit(500_000)
        await eventually(lambda: bool(trainer.said("checkpoint_failed")))
        assert len(names(root)) <= 2, "nothing half is left"
        trainer.limit(resource.RLIM_INFINITY)
        assert await trainer.code() == ExitCode.OK
        failed = trainer.said("checkpoint_failed")
        assert {line["step"] for line in failed} == {"write"}
        assert "File too large" in failed[0]["cause"]
        pushed = [p for p in trainer.said("pushed") if p["rank"] == 0]
        assert [(p["version"], p["status"]) for p in pushed] == [(n, "COMMITTED") for n in range(1, 9)]
        known = await checkpoints(fleet)
        assert known[0].version.number > int(failed[-1]["version"].split(".")[1]), (
            "a later push has its checkpoint again"
        )
        assert sorted(c.name for c in known) == names(root)
        written = trainer.said("checkpoint_written")[-1]
        assert written["bytes"] == known[0].byte_count
        assert 0 <= written["seconds"] < 60


async def test_an_agent_killed_while_it_writes_leaves_nothing_under_a_checkpoints_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints"
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "trainer.mid_checkpoint").write_text("kill after=3")
    async with fleet_for_toys(tmp_path, lease_ttl_seconds=1.0) as fleet:
        trainer = await LimitedTrainer.start(fleet, Script(steps=200, pause_before_step=0.2), root)
        assert await trainer.code() == -signal.SIGKILL
        assert [n for n in names(root) if not n.startswith(".")] == []
        assert await checkpoints(fleet) == []
        async with toy_trainer(fleet.address, checkpoint_root=root) as again:
            ranks = await ObedientRanks.start(again)
            await pushed_and_kept(fleet, ranks, 1)
            assert [c.name for c in await checkpoints(fleet)] == names(root), "the next writer cleared it away"
            assert await ranks.leave() == [0, 0]

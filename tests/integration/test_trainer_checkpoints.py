"""Checkpoints of real pushes: a real coordinator, in-memory engines, a trainer agent with toy ranks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from controlplane.checkpoints import CheckpointManifest, open_files, read_manifest
from controlplane.cli import engine_orders as orders
from controlplane.devices import cpu_device_uuid
from controlplane.exit_codes import ExitCode
from controlplane.failpoints import DIRECTORY_VARIABLE
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.obedient import ObedientRanks
from tests.support.toy_rank import SHAPES, Script, tensors_of
from tests.support.toy_trainer import RankProcess, fleet_for_toys, start_engine, toy_trainer
from trainer_agent.agent import checkpoints as keeping
from trainer_agent.agent.checkpoint_files import Whole, write
from trainer_agent.agent.frames import SegmentReader
from trainer_agent.wire import RANK_SOCKET_VARIABLE
from weightplane.v1 import fleet_pb2

pytestmark = pytest.mark.timeout(240)

TOY = Path(__file__).parents[1] / "support" / "toy_rank.py"
ROOT = Path(__file__).parents[2]


async def checkpoints(fleet: LocalFleet) -> list[fleet_pb2.Checkpoint]:
    """What the coordinator can bring by itself, newest first."""
    return list((await fleet.view()).checkpoints)


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def contents(root: Path, name: str, manifest: CheckpointManifest) -> dict[str, bytes]:
    """sha256 of each tensor's bytes as they lie in the files."""
    found = {}
    for file in open_files(root, name, manifest):
        for index, stored in file.tensors:
            data = os.pread(file.descriptor, stored.byte_count, stored.offset)
            found[manifest.layout.tensors[index].name] = hashlib.sha256(data).digest()
        file.close()
    return found


def pushed_contents(step: int) -> dict[str, bytes]:
    return {name: hashlib.sha256(t.numpy().tobytes()).digest() for name, t in tensors_of(step).items()}


async def pushed_and_kept(fleet: LocalFleet, ranks: ObedientRanks, step: int) -> int:
    """The number under which `step` was pushed, once its checkpoint is known to the coordinator."""
    number = (await ranks.all("push", step=step))[0]["version"]

    async def known() -> bool:
        return number in [c.version.number for c in await checkpoints(fleet)]

    await eventually(known, within=30)
    return int(number)


@pytest.mark.parametrize("transport", ["shared_memory", "inline"])
async def test_each_commit_lies_on_disk_as_engines_hold_it_and_older_ones_go(tmp_path: Path, transport: str) -> None:
    root = tmp_path / "checkpoints"
    async with (
        fleet_for_toys(tmp_path, transport=transport) as fleet,
        toy_trainer(fleet.address, checkpoint_root=root, checkpoint_keep=2) as trainer,
    ):
        ranks = await ObedientRanks.start(trainer)
        assert [await pushed_and_kept(fleet, ranks, step) for step in (1, 2, 3)] == [1, 2, 3]
        await eventually(lambda: len(names(root)) == 2, within=30)
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
            await eventually(lambda: stay(1, 3), within=30)
        stays = [e["cause"] for e in events if e["event"] == "checkpoint_stays"]
        assert stays
        assert all("e1" in cause for cause in stays)
        await orders.release(held, 0.0)
        await pushed_and_kept(fleet, ranks, 4)
        await eventually(lambda: stay(4), within=30)


async def test_a_later_life_of_the_trainer_retires_what_the_first_one_wrote(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    async with fleet_for_toys(tmp_path, lease_ttl_seconds=1.0) as fleet:
        for _ in range(2):
            async with toy_trainer(fleet.address, checkpoint_root=root, checkpoint_keep=1) as trainer:
                ranks = await trainer.start_ranks(Script(steps=1))
                assert [await r.code() for r in ranks] == [0, 0]
        assert [c.version.number for c in await checkpoints(fleet)] == [2]
        assert len(names(root)) == 1


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
        await eventually(lambda: keeper.idle, within=30)
        [known] = await checkpoints(fleet)
        assert known.version.number == 1
        assert contents(root, known.name, read_manifest(root, known.name)) == pushed_contents(1)
        assert await pushed_and_kept(fleet, ranks, 4) == 4


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

        await eventually(serves, within=30)
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
        await eventually(lambda: len(names(root)) == 2, within=30)
        assert [c.version.number for c in await checkpoints(fleet)] == [3, 2]


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
        await eventually(fenced.is_set, within=30)
        await eventually(trainer.agent.refused_event.is_set, within=30)
        assert [a["reason"] for a in await ranks.all("push", step=2)] == ["STALE_TERM"] * 2
        assert [await r.code() for r in ranks.ranks] == [ExitCode.FENCED] * 2
        assert await checkpoints(fleet) == []
        await eventually(lambda: names(root) == [])


# ---- a full disk ----


class LimitedTrainer:
    """`run_trainer` in a process whose files can be limited in size, as a full disk limits them."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, fleet: LocalFleet, script: Script, root: Path) -> LimitedTrainer:
        code = (
            "import asyncio, sys; from pathlib import Path;"
            "from controlplane.rpc.logs import configure_logging;"
            "from trainer_agent.agent import TrainerSettings, run_trainer;"
            "configure_logging('trainer', json=True);"
            f"settings = TrainerSettings(coordinator={fleet.address!r}, nproc_per_node=2, max_restarts=0,"
            f" chunk_bytes=65536, checkpoint_root=Path({str(root)!r}), checkpoint_keep=2);"
            f"sys.exit(asyncio.run(run_trainer(settings, [{str(TOY)!r}, {json.dumps(asdict(script))!r}])))"
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=environment, cwd=ROOT
            )
        )

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                continue

    def said(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == event]

    def limit(self, byte_count: int) -> None:
        """No file of the agent grows beyond it from now on; its ranks are other processes."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (byte_count, hard))

    async def code(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 100)
        await self._reader
        return code


async def test_a_full_disk_costs_an_event_and_no_push_and_passes(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    async with fleet_for_toys(tmp_path) as fleet:
        trainer = await LimitedTrainer.start(fleet, Script(steps=8, pause_before_step=1.0), root)
        await eventually(lambda: bool(trainer.said("checkpoint_published")), within=60)
        trainer.limit(500_000)
        await eventually(lambda: bool(trainer.said("checkpoint_failed")), within=60)
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

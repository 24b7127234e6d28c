"""A trainer agent's checkpoints: what is written, told and deleted, with a coordinator that does as the test says."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import xxhash
from structlog.testing import capture_logs

from controlplane.checkpoints import CheckpointManifest, old_numbers, open_files, read_manifest
from controlplane.core import errors as e
from controlplane.core.layout import DType, Layout, TensorSpec, content_digest
from controlplane.devices import host_id
from tests.support.eventually import eventually
from tests.support.refusals import rpc_error
from trainer_agent.agent import checkpoints
from trainer_agent.agent.checkpoint_files import Whole, write
from trainer_agent.agent.checkpoints import CheckpointKeeper
from trainer_agent.agent.frames import SegmentReader
from trainer_agent.segments import create
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, layout_pb2, version_pb2, weight_update_pb2

LAYOUT = Layout(
    (TensorSpec("a", DType.F32, (40, 100)), TensorSpec("empty", DType.F32, (0, 8)), TensorSpec("b", DType.F32, ()))
)
SPLIT = 10_000
SEGMENT = f"weightplane-unit-{os.getpid()}"
STALE = e.StaleTerm(model="policy", got=1, current=2)


class Coordinator:
    """Answers by script, and notes what it was told."""

    def __init__(self) -> None:
        self.published: list[fleet_pb2.Checkpoint] = []
        self.retired: list[int] = []
        self.refusals: dict[str, list[Exception]] = {"publish": [], "retire": []}
        self.before_retire: list[list[str]] = []
        self.root = Path()

    async def PublishCheckpoint(self, request: fleet_pb2.PublishCheckpointRequest, timeout: float) -> None:
        self._refuse("publish")
        self.published.append(request.checkpoint)

    async def RetireCheckpoint(self, request: fleet_pb2.RetireCheckpointRequest, timeout: float) -> None:
        self._refuse("retire")
        self.before_retire.append(names(self.root))
        self.retired.append(request.number)

    def _refuse(self, call: str) -> None:
        if self.refusals[call]:
            raise self.refusals[call].pop(0)

    @property
    def stub(self) -> fleet_pb2_grpc.FleetAsyncStub:
        return cast("fleet_pb2_grpc.FleetAsyncStub", self)  # it exists for type checkers only


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    made = Coordinator()
    made.root = tmp_path
    return made


@pytest.fixture
def segment() -> Iterator[memoryview]:
    made = create(SEGMENT, 65536)
    made.memory[:] = os.urandom(len(made.memory))
    yield made.memory
    made.unlink()


def whole(memory: memoryview, number: int = 1, *, run_id: str = "run", term: int = 1) -> Whole:
    """Two tensors in two chunks; the first is split over both."""
    sums = [
        xxhash.xxh3_64_digest(memory[:16_000]),
        xxhash.xxh3_64_digest(b""),
        xxhash.xxh3_64_digest(memory[16_064:16_068]),
    ]
    chunks = [chunk(0, 0, (0, 0, SPLIT)), chunk(1, SPLIT, (0, 0, 16_000 - SPLIT), (1, 6064, 0), (2, 6064, 4))]
    state = fleet_pb2.UpdateState(
        update_id=f"u-{number}", version=version_pb2.WeightVersion(term=term, number=number), step=number * 10
    )
    return Whole(run_id, "policy", state, term, LAYOUT, content_digest(sums), chunks)


def chunk(index: int, offset: int, *records: tuple[int, int, int]) -> rank_pb2.SendChunk:
    made = rank_pb2.SendChunk(index=index)
    for tensor, at, size in records:
        made.records.append(weight_update_pb2.TensorRecord(tensor=tensor, buffer_offset=at, byte_count=size))
    for device in ("GPU-0", "GPU-1"):
        place = layout_pb2.SharedMemoryRange(segment=SEGMENT, host_id=host_id(), offset=offset, byte_count=20_000)
        made.buffers.append(layout_pb2.BufferHandle(device_uuid=device, shared_memory=place))
    return made


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


async def kept(keeper: CheckpointKeeper, version: Whole, coordinator: Coordinator) -> bool:
    """Begun, and waited for. Raises what fenced it."""
    fences: list[e.StaleTerm] = []
    begun = keeper.begin(version, coordinator.stub, fences.append)
    await keeper.finish()
    if fences:
        raise fences[0]
    return begun


def failures(logs: list[Any]) -> list[tuple[str, str]]:
    return [(line["step"], line["reason"]) for line in logs if line["event"] == "checkpoint_failed"]


async def test_a_version_is_written_from_the_segment_told_and_timed(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator
) -> None:
    keeper = CheckpointKeeper(tmp_path, every=1, keep=2)
    version = whole(segment, 7)
    with capture_logs() as logs:
        assert await kept(keeper, version, coordinator)
    [told] = coordinator.published
    manifest = read_manifest(tmp_path, told.name)
    assert (manifest.run_id, manifest.model, str(manifest.version), manifest.step) == ("run", "policy", "1.7", 70)
    assert manifest.content_digest == told.content_digest == version.content_digest
    assert (told.tensor_count, told.file_count, told.byte_count) == (3, 1, 16_004)
    [file] = open_files(tmp_path, told.name, manifest)
    by_index = dict(file.tensors)
    assert os.pread(file.descriptor, 16_000, by_index[0].offset) == segment[:16_000]
    assert os.pread(file.descriptor, 4, by_index[2].offset) == segment[16_064:16_068]
    file.close()
    [written] = [line for line in logs if line["event"] == "checkpoint_written"]
    assert (written["bytes"], written["version"]) == (16_004, "1.7")
    assert written["seconds"] >= 0


async def test_older_ones_are_retired_at_the_coordinator_before_they_are_deleted(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator
) -> None:
    keeper = CheckpointKeeper(tmp_path, every=1, keep=2)
    for number in (1, 2, 5):
        await kept(keeper, whole(segment, number), coordinator)
    assert coordinator.retired == [1]
    assert len(coordinator.before_retire[0]) == 3, "it was still there"
    assert [n.split("-")[-2] for n in names(tmp_path)] == ["00000002", "00000005"]


async def test_those_of_an_earlier_life_are_retired_and_nothing_else_is_ever_touched(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator
) -> None:
    for number in (1, 2):
        await kept(CheckpointKeeper(tmp_path, every=1, keep=9), whole(segment, number), coordinator)
    await kept(CheckpointKeeper(tmp_path, every=1, keep=1), whole(segment, 1, run_id="other"), coordinator)
    (tmp_path / "notes.txt").write_text("mine")
    ours = next(n for n in names(tmp_path) if n.startswith("wp-run-"))
    (tmp_path / f"{ours}-no-manifest").mkdir()
    (tmp_path / f"{ours}-link").symlink_to(tmp_path / ours)
    before = names(tmp_path)
    await kept(CheckpointKeeper(tmp_path, every=1, keep=1), whole(segment, 3), coordinator)
    assert coordinator.retired == [1, 2]
    gone = set(before) - set(names(tmp_path))
    assert {n.split("-")[-2] for n in gone} == {"00000001", "00000002"}
    assert len(gone) == 2


def test_what_is_newer_than_the_committed_version_is_never_retired() -> None:
    found = {"a": 1, "b": 2, "c": 3, "d": 50}
    assert old_numbers(found, 3, keep=2) == {1}
    assert old_numbers(found, 3, keep=1) == {1, 2}
    assert old_numbers(found, 3, keep=9) == set()
    assert old_numbers({"of another history": 50}, 1, keep=1) == set()


async def test_a_refused_publication_is_an_event_and_leaves_no_checkpoint(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator
) -> None:
    unknown = e.VersionUnavailable(wanted="1.1", applied="unset")
    coordinator.refusals["publish"] = [rpc_error(unknown)]
    with capture_logs() as logs:
        assert await kept(CheckpointKeeper(tmp_path, every=1, keep=1), whole(segment), coordinator)
    assert failures(logs) == [("publish", "VERSION_UNAVAILABLE")]
    assert names(tmp_path) == []
    assert coordinator.published == []


async def test_a_publication_is_tried_again_while_the_coordinator_restarts(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator
) -> None:
    recovering = e.CoordinatorRecovering(term=2, engines=["e0"])
    coordinator.refusals["publish"] = [rpc_error(), rpc_error(recovering)]
    assert await kept(CheckpointKeeper(tmp_path, every=1, keep=1), whole(segment), coordinator)
    assert len(coordinator.published) == 1


async def test_a_publication_whose_answer_never_came_is_taken_back_the_next_time(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = CheckpointKeeper(tmp_path, every=1, keep=5)
    monkeypatch.setattr(checkpoints, "TELL_SECONDS", 0.3)
    coordinator.refusals["publish"] = [rpc_error()] * 9
    with capture_logs() as logs:
        await kept(keeper, whole(segment, 1), coordinator)
    assert failures(logs) == [("publish", "DEADLINE_EXCEEDED")]
    assert names(tmp_path) == []
    coordinator.refusals["publish"].clear()
    await kept(keeper, whole(segment, 2), coordinator)
    assert coordinator.retired == [1]


@pytest.mark.parametrize("step", ["publish", "retire"])
async def test_inv_7_a_fence_is_raised_and_nothing_more_is_done(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator, step: str
) -> None:
    keeper = CheckpointKeeper(tmp_path, every=1, keep=1)
    await kept(keeper, whole(segment, 1), coordinator)
    coordinator.refusals[step] = [rpc_error(STALE)]
    with pytest.raises(e.StaleTerm):
        await kept(keeper, whole(segment, 2), coordinator)
    left = ["00000001"] if step == "publish" else ["00000001", "00000002"]
    assert [n.split("-")[-2] for n in names(tmp_path)] == left


async def test_what_could_not_be_retired_is_not_deleted_and_is_retired_the_next_time(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator
) -> None:
    keeper = CheckpointKeeper(tmp_path, every=1, keep=1)
    await kept(keeper, whole(segment, 1), coordinator)
    coordinator.refusals["retire"] = [rpc_error(e.WrongRun(expected="a", got="b"))]
    with capture_logs() as logs:
        assert await kept(keeper, whole(segment, 2), coordinator)
    assert failures(logs) == [("retire", "WRONG_RUN")]
    assert len(names(tmp_path)) == 2
    await kept(keeper, whole(segment, 3), coordinator)
    assert coordinator.retired == [1, 2]
    assert len(names(tmp_path)) == 1


async def test_a_root_that_is_a_file_is_an_event(tmp_path: Path, segment: memoryview, coordinator: Coordinator) -> None:
    root = tmp_path / "root"
    root.write_text("a file")
    with capture_logs() as logs:
        assert await kept(CheckpointKeeper(root, every=1, keep=1), whole(segment), coordinator)
    assert failures(logs) == [("write", "")]
    assert coordinator.published == []


async def test_bytes_that_are_not_the_versions_are_never_published(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator
) -> None:
    version = whole(segment)
    segment[5] ^= 1
    with capture_logs() as logs:
        assert await kept(CheckpointKeeper(tmp_path, every=1, keep=1), version, coordinator)
    assert failures(logs) == [("write", "")]
    assert names(tmp_path) == []
    assert coordinator.published == []


async def test_a_leader_whose_segment_is_gone_is_an_event(tmp_path: Path, coordinator: Coordinator) -> None:
    version = whole(memoryview(bytearray(65536)))
    with capture_logs() as logs:
        assert not await kept(CheckpointKeeper(tmp_path, every=1, keep=1), version, coordinator), "nothing reads it"
    assert failures(logs) == [("write", "")]
    assert names(tmp_path) == []


async def test_memory_without_a_place_on_this_host_is_an_event(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator
) -> None:
    version = replace(whole(segment), chunks=[rank_pb2.SendChunk(index=0)])
    with capture_logs() as logs:
        assert not await kept(CheckpointKeeper(tmp_path, every=1, keep=1), version, coordinator)
    assert failures(logs) == [("write", "")]


async def test_a_disk_that_hangs_keeps_its_thread_and_no_other_checkpoint_is_due_meanwhile(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, stopped = threading.Event(), threading.Event()

    def hangs(root: Path, version: Whole, reader: SegmentReader, stop: threading.Event) -> None:
        stop.wait(60)
        stopped.set()
        disk.wait(60)

    monkeypatch.setattr(checkpoints, "write", hangs)
    monkeypatch.setattr(checkpoints, "WRITE_SECONDS", 0.1)
    monkeypatch.setattr(checkpoints, "STOP_SECONDS", 0.1)
    keeper = CheckpointKeeper(tmp_path, every=1, keep=1)
    with capture_logs() as logs:
        assert keeper.begin(whole(segment, 1), coordinator.stub, lambda fence: None)
        await eventually(lambda: failures(logs) == [("write", "")])
        await eventually(stopped.is_set)  # it was told to stop
        assert not keeper.due()
        disk.set()
        await eventually(keeper.due)
    assert coordinator.published == []


async def test_an_agent_that_ends_leaves_nothing_half_of_what_it_was_writing(
    tmp_path: Path, segment: memoryview, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def slow(root: Path, version: Whole, reader: SegmentReader, stop: threading.Event) -> CheckpointManifest | None:
        begun.set()
        stop.wait(60)
        return write(root, version, reader, stop)

    monkeypatch.setattr(checkpoints, "write", slow)
    keeper = CheckpointKeeper(tmp_path, every=1, keep=1)
    keeper.begin(whole(segment, 1), coordinator.stub, lambda fence: None)
    await eventually(begun.is_set)
    with capture_logs() as logs:
        await keeper.finish(0.0)
    assert failures(logs) == [("write", "")]
    assert names(tmp_path) == []
    assert coordinator.published == []


def test_the_first_commit_is_kept_and_then_each_so_many_th_and_a_turn_that_was_missed_is_made_up_for(
    tmp_path: Path,
) -> None:
    keeper = CheckpointKeeper(tmp_path, every=3, keep=1)
    turns = []
    for commit in range(9):
        turns.append(keeper.due())
        keeper.committed()
        if turns[-1] and commit != 3:  # the one of that turn came to nothing before it was begun
            keeper._since = 0
    assert turns == [True, False, False, True, True, False, False, True, False]

"""Receivers: bytes are where the account says, stay readable without their sender, and wrong places are refused."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from controlplane.checkpoints import CheckpointManifest, read_manifest, write_checkpoint
from controlplane.core.assembly import Assembly, Record
from controlplane.core.errors import (
    ByteCountMismatch,
    CheckpointUnreadable,
    ChecksumMismatch,
    DeviceHandlesMissing,
    FrameInvalid,
    SegmentUnreadable,
    UpdateAborted,
    WeightplaneError,
)
from controlplane.core.layout import DType, Layout, TensorSpec, content_digest
from controlplane.core.versions import ModelName, RunId, Term, WeightVersion
from engine_agent.engine import StagedWeights
from engine_agent.receivers.checkpoint import CheckpointReceiver
from engine_agent.receivers.inline import InlineReceiver
from engine_agent.receivers.port import Buffer, Receiver
from engine_agent.receivers.shared_memory import SharedMemoryReceiver
from engine_agent.receivers.staging import Staging

LAYOUT = Layout((TensorSpec("a", DType.U8, (100,)), TensorSpec("b", DType.U8, (7,))))
A, B = os.urandom(100), os.urandom(7)
HOST = "this-host"
SEGMENT = f"weightplane-test-receivers-{os.getpid()}"


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path("/dev/shm") / SEGMENT
    path.write_bytes(A + bytes(28) + B + bytes(57))
    yield path
    path.unlink(missing_ok=True)


def records() -> list[Record]:
    return [Record(0, 0, 0, 100, b"x" * 8), Record(1, 0, 128, 7, b"x" * 8)]


def in_segment(device: str = "", offset: int = 0, count: int = 192, host: str = HOST, name: str = SEGMENT) -> Buffer:
    return Buffer(device, name, host, offset, count)


def bytes_of(staged: StagedWeights, tensor: int, device: str = "") -> bytes:
    place = staged.placements[tensor]
    span = staged.chunks[device][place.chunk]
    with open(span.path, "rb") as file:
        file.seek(span.offset + place.offset)
        return file.read(staged.layout.tensors[tensor].byte_count)


def test_shared_memory_is_read_in_place_also_after_its_name_is_gone(segment: Path) -> None:
    receiver = SharedMemoryReceiver(LAYOUT, HOST, ("d0",))
    receiver.place(records(), [in_segment()])
    segment.unlink()
    receiver.check(0, xxhash.xxh3_64_digest(A))
    staged = receiver.staged("1")
    assert (bytes_of(staged, 0), bytes_of(staged, 1)) == (A, B)
    receiver.close()


def test_inline_bytes_are_copied_and_a_split_tensor_is_joined() -> None:
    receiver = InlineReceiver(Staging(LAYOUT))
    receiver.place([Record(0, 0, 0, 60, None)], [Buffer("", inline=A[:60])])
    receiver.place([Record(0, 60, 0, 40, b""), Record(1, 0, 40, 7, b"")], [Buffer("", inline=A[60:] + B)])
    receiver.check(0, xxhash.xxh3_64_digest(A))
    receiver.check(1, xxhash.xxh3_64_digest(B))
    staged = receiver.staged("1")
    assert (bytes_of(staged, 0), bytes_of(staged, 1)) == (A, B)
    receiver.close()


def test_g2_every_device_of_the_engine_must_have_a_buffer(segment: Path) -> None:
    receiver = SharedMemoryReceiver(LAYOUT, HOST, ("d0", "d1"))
    with pytest.raises(DeviceHandlesMissing) as refusal:
        receiver.place(records(), [in_segment("d0")])
    assert refusal.value.missing == ["d1"]
    receiver.place(records(), [in_segment("d0"), in_segment("d1")])
    assert bytes_of(receiver.staged("1"), 1, "d1") == B
    receiver.close()


@pytest.mark.parametrize(
    ("buffers", "error"),
    [
        ([in_segment(host="other-host")], SegmentUnreadable),
        ([in_segment(name="weightplane-none")], SegmentUnreadable),
        ([in_segment(count=4096)], ByteCountMismatch),
        ([Buffer("", inline=A)], FrameInvalid),
        ([in_segment("d0"), in_segment("d1", offset=64, count=64)], FrameInvalid),
    ],
)
def test_a_buffer_that_cannot_be_read_is_refused(
    segment: Path, buffers: list[Buffer], error: type[WeightplaneError]
) -> None:
    receiver = SharedMemoryReceiver(LAYOUT, HOST, ())
    with pytest.raises(error):
        receiver.place(records(), buffers)
    receiver.close()


def test_a_link_in_shared_memory_is_not_followed(segment: Path) -> None:
    link = segment.with_name(f"{SEGMENT}-link")
    link.symlink_to("/etc/hostname")
    try:
        with pytest.raises(SegmentUnreadable):
            SharedMemoryReceiver(LAYOUT, HOST, ()).place(records(), [in_segment(name=link.name)])
    finally:
        link.unlink()


def test_a_tensor_split_over_chunks_must_lie_in_one_piece(segment: Path) -> None:
    receiver = SharedMemoryReceiver(LAYOUT, HOST, ())
    receiver.place([Record(0, 0, 0, 60, None)], [in_segment(count=60)])
    with pytest.raises(FrameInvalid):
        receiver.place([Record(0, 60, 0, 40, b"x" * 8)], [in_segment(offset=80, count=40)])
    receiver.place([Record(0, 60, 0, 40, b"x" * 8)], [in_segment(offset=60, count=40)])
    receiver.check(0, xxhash.xxh3_64_digest(A))
    receiver.close()


@pytest.mark.parametrize("kind", ["inline", "shared_memory"])
def test_m3_other_bytes_than_stated_are_refused_and_a_closed_receiver_says_so(segment: Path, kind: str) -> None:
    receiver: Receiver
    if kind == "inline":
        receiver = InlineReceiver(Staging(LAYOUT))
        receiver.place([Record(0, 0, 0, 100, b"")], [Buffer("", inline=A)])
    else:
        receiver = SharedMemoryReceiver(LAYOUT, HOST, ())
        receiver.place(records(), [in_segment()])
    with pytest.raises(ChecksumMismatch):
        receiver.check(0, xxhash.xxh3_64_digest(B))
    receiver.close()
    receiver.close()
    with pytest.raises(UpdateAborted):
        receiver.check(0, xxhash.xxh3_64_digest(A))


def test_descriptors_are_given_back(segment: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        shared = SharedMemoryReceiver(LAYOUT, HOST, ())
        shared.place(records(), [in_segment()])
        inline = InlineReceiver(Staging(LAYOUT))
        shared.close()
        inline.close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- checkpoints --------------------------------------------------------------------------------


def kept(root: Path, name: str = "policy-1") -> CheckpointManifest:
    """A checkpoint of A and B, a file for each."""
    return write_checkpoint(
        root,
        name,
        run_id=RunId("run"),
        model=ModelName("policy"),
        version=WeightVersion(1, Term(1)),
        step=None,
        layout=LAYOUT,
        content_digest=content_digest([xxhash.xxh3_64_digest(A), xxhash.xxh3_64_digest(B)]),
        tensors=[("a", A), ("b", B)],
        shard_bytes=50,
    )


def test_a_checkpoint_is_read_in_place_also_after_it_was_deleted(tmp_path: Path) -> None:
    manifest = kept(tmp_path)
    receiver = CheckpointReceiver(tmp_path, "policy-1", manifest)
    assembly = Assembly(LAYOUT)
    for index, (found, size) in enumerate(receiver.open()):
        assert assembly.add(index, found, size) == [index]
    assert assembly.digest() == manifest.content_digest
    shutil.rmtree(tmp_path / "policy-1")
    for tensor, checksum in enumerate(manifest.checksums):
        receiver.check(tensor, checksum)
    staged = receiver.staged("5")
    assert (bytes_of(staged, 0), bytes_of(staged, 1)) == (A, B)
    receiver.close()


def test_m3_a_checkpoint_of_other_bytes_than_its_manifest_states_is_refused(tmp_path: Path) -> None:
    manifest = kept(tmp_path)
    with (tmp_path / "policy-1" / manifest.files[0]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([A[-1] ^ 1]))
    receiver = CheckpointReceiver(tmp_path, "policy-1", manifest)
    receiver.open()
    receiver.check(1, manifest.checksums[1])
    with pytest.raises(ChecksumMismatch):
        receiver.check(0, manifest.checksums[0])
    receiver.close()


def test_a_checkpoint_cut_short_after_it_was_opened_is_a_refusal_and_no_signal(tmp_path: Path) -> None:
    manifest = kept(tmp_path)
    receiver = CheckpointReceiver(tmp_path, "policy-1", manifest)
    receiver.open()
    os.truncate(tmp_path / "policy-1" / manifest.files[0], 10)
    with pytest.raises(CheckpointUnreadable, match="cut short while it was read"):
        receiver.check(0, manifest.checksums[0])
    receiver.close()


def test_a_tensor_that_a_worker_could_not_view_in_place_is_refused(tmp_path: Path) -> None:
    layout = Layout((TensorSpec("x", DType.I64, (1,)),))
    manifest = write_checkpoint(
        tmp_path,
        "policy-1",
        run_id=RunId("run"),
        model=ModelName("policy"),
        version=WeightVersion(1, Term(1)),
        step=None,
        layout=layout,
        content_digest=content_digest([xxhash.xxh3_64_digest(bytes(8))]),
        tensors=[("x", bytes(8))],
    )
    file = tmp_path / "policy-1" / manifest.files[0]
    header = file.read_bytes()[8:-8].rstrip() + b" "
    header += b" " * (len(header) % 2 == 0)  # an odd length, which safetensors allows and no writer of today makes
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    receiver = CheckpointReceiver(tmp_path, "policy-1", manifest)
    with pytest.raises(CheckpointUnreadable, match="x is not aligned for I64"):
        receiver.open()
    receiver.close()


@pytest.mark.parametrize("call", ["open", "check"])
def test_a_checkpoint_attempt_that_was_ended_says_so(tmp_path: Path, call: str) -> None:
    manifest = kept(tmp_path)
    receiver = CheckpointReceiver(tmp_path, "policy-1", read_manifest(tmp_path, "policy-1"))
    if call == "check":
        receiver.open()
    receiver.close()
    receiver.close()
    act: Callable[[], object] = receiver.open if call == "open" else lambda: receiver.check(0, manifest.checksums[0])
    with pytest.raises(UpdateAborted):
        act()


def test_an_attempt_is_ended_at_once_also_while_its_disk_hangs_and_its_files_are_closed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    manifest = kept(tmp_path)
    receiver = CheckpointReceiver(tmp_path, "policy-1", manifest)
    receiver.open()
    reading, answers, errors = threading.Event(), threading.Event(), []

    def hangs(*_: object) -> bytes:
        reading.set()
        answers.wait(60)
        return A[:10]

    def check() -> None:
        try:
            receiver.check(0, manifest.checksums[0])
        except WeightplaneError as error:
            errors.append(error.reason)

    monkeypatch.setattr(os, "pread", hangs)
    thread = threading.Thread(target=check)
    thread.start()
    assert reading.wait(60)
    receiver.close()  # would hang here
    assert len(os.listdir("/proc/self/fd")) > before
    answers.set()
    thread.join(60)
    assert errors == ["UPDATE_ABORTED"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_writer_sends_a_checkpoints_chunks(tmp_path: Path) -> None:
    receiver = CheckpointReceiver(tmp_path, "policy-1", kept(tmp_path))
    with pytest.raises(FrameInvalid):
        receiver.place(records(), [Buffer("", inline=A)])
    receiver.close()

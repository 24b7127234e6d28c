"""Checkpoints are whole under their name or not there, whoever dies, whatever is full, whatever lies there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.checkpoints import (
    MANIFEST_NAME,
    CheckpointNotWritten,
    CheckpointWriter,
    read_manifest,
    write_checkpoint,
)
from controlplane.core.errors import CheckpointUnreadable
from controlplane.core.layout import DType, Layout, TensorSpec
from controlplane.core.versions import ModelName, RunId
from tests.support.written_checkpoints import LAYOUT, NAME, entries, head, read_back, tensors_of, write


def test_bytes_come_in_pieces_and_tensors_in_any_order(tmp_path: Path) -> None:
    tensors = tensors_of()
    with CheckpointWriter(tmp_path, NAME, **head(tensors)) as writer:
        for index in reversed(range(len(LAYOUT.tensors))):
            data = tensors[LAYOUT.tensors[index].name]
            for start in range(0, len(data), 9):
                writer.write(index, memoryview(data)[start : start + 9])
        manifest = writer.commit()
    assert read_back(tmp_path, manifest) == tensors


def test_a_memoryview_of_elements_is_written_as_its_bytes(tmp_path: Path) -> None:
    layout = Layout((TensorSpec("x", DType.I32, (4,)),))
    data = memoryview(bytes(range(16))).cast("i", (2, 2))
    manifest = write_checkpoint(tmp_path, NAME, tensors=[("x", data)], **head({"x": bytes(range(16))}, layout=layout))
    assert read_back(tmp_path, manifest) == {"x": bytes(range(16))}


def test_the_same_again_is_done_and_asks_for_no_bytes(tmp_path: Path) -> None:
    first = write(tmp_path)
    stamp = (tmp_path / NAME / MANIFEST_NAME).stat().st_mtime_ns

    def none_wanted() -> Iterator[tuple[str, bytes]]:
        raise AssertionError("nobody asked")
        yield

    assert write_checkpoint(tmp_path, NAME, tensors=none_wanted(), **head(tensors_of())) == first
    assert (tmp_path / NAME / MANIFEST_NAME).stat().st_mtime_ns == stamp


@pytest.mark.parametrize("changed", [{}, {"run_id": RunId("other")}, {"model": ModelName("critic")}])
def test_other_content_under_its_name_is_refused_and_what_was_there_stays(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    first = write(tmp_path)
    tensors = tensors_of() if changed else tensors_of(seed=2)
    with pytest.raises(CheckpointNotWritten, match=r"it is there with other content: policy 2\.7 of run run"):
        write(tmp_path, tensors, **changed)
    assert read_manifest(tmp_path, NAME) == first
    assert entries(tmp_path) == [NAME]


@pytest.mark.parametrize("there", ["directory", "file", "link"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, there: str) -> None:
    place = tmp_path / NAME
    if there == "directory":
        (place / "precious").mkdir(parents=True)
    elif there == "file":
        place.write_text("precious")
    else:
        place.symlink_to("/etc")
    with pytest.raises(CheckpointNotWritten, match="something else has its name"):
        write(tmp_path)
    assert entries(tmp_path) == [NAME]
    assert there != "directory" or entries(place) == ["precious"]


def test_two_writers_of_the_same_are_both_done(tmp_path: Path) -> None:
    tensors = tensors_of()
    with (
        CheckpointWriter(tmp_path, NAME, **head(tensors)) as one,
        CheckpointWriter(tmp_path, NAME, **head(tensors)) as other,
    ):
        for writer in (one, other):
            for index, data in enumerate(tensors.values()):
                writer.write(index, data)
        assert one.commit() == other.commit()
    assert entries(tmp_path) == [NAME]


def _wrong(writer: CheckpointWriter, tensors: list[bytes]) -> None:
    for index, data in enumerate(tensors):
        writer.write(index, bytes(b ^ 1 for b in data))


def _missing(writer: CheckpointWriter, tensors: list[bytes]) -> None:
    for index, data in enumerate(tensors[:-1]):
        writer.write(index, data)


def _too_many(writer: CheckpointWriter, tensors: list[bytes]) -> None:
    writer.write(1, tensors[1] + b"x")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_wrong, "not those of the version"),
        (_missing, "not whole, such as head"),
        (_too_many, "has 140 bytes, 141 came"),
    ],
)
def test_other_bytes_than_the_versions_make_no_checkpoint(
    tmp_path: Path, spoil: Callable[[CheckpointWriter, list[bytes]], None], says: str
) -> None:
    def attempt() -> None:
        tensors = tensors_of()
        with CheckpointWriter(tmp_path, NAME, **head(tensors)) as writer:
            spoil(writer, list(tensors.values()))
            writer.commit()

    with pytest.raises(CheckpointNotWritten, match=says):
        attempt()
    assert entries(tmp_path) == []


def test_tensors_out_of_the_layouts_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotWritten, match="tensor 0 of the layout is not head"):
        write(tmp_path, dict(reversed(tensors_of().items())))


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "x" * 201, "über"])
def test_a_name_that_is_none_is_refused_by_both_sides(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointNotWritten):
        write(tmp_path, name=name)
    with pytest.raises(CheckpointUnreadable):
        read_manifest(tmp_path, name)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(CheckpointNotWritten, match="No space left on device"):
        write(tmp_path)
    assert entries(tmp_path) == []


def test_a_root_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotWritten, match=r"Not a directory|File exists"):
        write(tmp_path / "file" / "deeper")


def test_everything_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        order.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    manifest = write(tmp_path)
    *synced, scratch, renamed, root = order
    assert sorted(synced) == sorted([*manifest.files, MANIFEST_NAME])
    assert scratch.startswith(f".{NAME}.")
    assert (renamed, root) == ("rename", tmp_path.name)


KILLED = """
import os, signal, sys
from pathlib import Path
from controlplane.checkpoints import CheckpointWriter
from tests.support.written_checkpoints import NAME, head, tensors_of
tensors = tensors_of()
writer = CheckpointWriter(Path(sys.argv[1]), NAME, **head(tensors))
for index, data in enumerate(tensors.values()):
    writer.write(index, data)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_no_checkpoint_and_the_next_one_removes_what_it_left(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = entries(tmp_path)
    with pytest.raises(CheckpointUnreadable):
        read_manifest(tmp_path, NAME)
    tensors = tensors_of(seed=2)
    with CheckpointWriter(tmp_path, "critic-8", **head(tensors)) as alive:
        assert left not in entries(tmp_path)
        write(tmp_path)
        assert len(entries(tmp_path)) == 2  # a writer that lives keeps what it has
        for index, data in enumerate(tensors.values()):
            alive.write(index, data)
        alive.commit()
    assert entries(tmp_path) == ["critic-8", NAME]

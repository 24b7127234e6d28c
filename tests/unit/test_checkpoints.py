"""Checkpoints: whole under their name or not there, and what is read is what was written, or a refusal."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from controlplane.checkpoints import (
    MANIFEST_NAME,
    CheckpointManifest,
    CheckpointNotWritten,
    CheckpointWriter,
    open_files,
    read_manifest,
    reading,
    write_checkpoint,
)
from controlplane.core.errors import CheckpointUnreadable
from controlplane.core.layout import DType, Layout, Target, TargetKind, TensorSpec, Tie, content_digest
from controlplane.core.versions import ModelName, RunId, Term, WeightVersion
from controlplane.tensor_files import StoredTensor, header_of, read_file

LAYOUT = Layout(
    (
        TensorSpec("flags", DType.BOOL, (3,)),
        TensorSpec("embed", DType.F32, (5, 7)),
        TensorSpec("nothing", DType.BF16, (0, 4)),
        TensorSpec("counter", DType.I64, ()),
        TensorSpec("head", DType.BF16, (9,), (Target(TargetKind.ADAPTER, "a"), Target())),
    ),
    (Tie("lm_head", "embed"),),
    "plain",
)
VERSION = WeightVersion(7, Term(2))
NAME = "policy-7"
LIBRARY: Any = safetensors


def tensors_of(layout: Layout = LAYOUT, seed: int = 1) -> dict[str, bytes]:
    return {t.name: bytes((i * seed + k) % 2 for k in range(t.byte_count)) for i, t in enumerate(layout.tensors)}


def digest_of(tensors: dict[str, bytes]) -> bytes:
    return content_digest([xxhash.xxh3_64_digest(data) for data in tensors.values()])


def head(tensors: dict[str, bytes], **changed: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "run_id": RunId("run"),
        "model": ModelName("policy"),
        "version": VERSION,
        "step": 70,
        "layout": LAYOUT,
        "content_digest": digest_of(tensors),
        "shard_bytes": 64,
    }
    return values | changed


def write(root: Path, tensors: dict[str, bytes] | None = None, name: str = NAME, **changed: Any) -> CheckpointManifest:
    tensors = tensors_of() if tensors is None else tensors
    return write_checkpoint(root, name, tensors=tensors.items(), **head(tensors, **changed))


def read_back(root: Path, manifest: CheckpointManifest) -> dict[str, bytes]:
    found = {}
    for file in open_files(root, NAME, manifest):
        for index, stored in file.tensors:
            found[manifest.layout.tensors[index].name] = os.pread(file.descriptor, stored.byte_count, stored.offset)
        file.close()
    return found


def entries(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = write(tmp_path)
    manifest = read_manifest(tmp_path, NAME)
    assert manifest == written
    assert (manifest.version, manifest.step, manifest.layout.digest) == (VERSION, 70, LAYOUT.digest)
    assert len(manifest.files) == 3
    assert read_back(tmp_path, manifest) == tensors_of()
    assert entries(tmp_path) == [NAME]


def test_the_safetensors_library_reads_the_files_as_they_were_meant(tmp_path: Path) -> None:
    found = {}
    for file in write(tmp_path).files:
        for name, tensor in LIBRARY.deserialize((tmp_path / NAME / file).read_bytes()):
            found[name] = (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
    tensors = tensors_of()
    assert found == {t.name: (t.dtype.name, t.shape, tensors[t.name]) for t in LAYOUT.tensors}


def test_the_safetensors_librarys_own_files_are_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True]), "c": torch.zeros(2, dtype=torch.bfloat16)}
    save_file(state, tmp_path / "x.safetensors", metadata={"format": "pt"})
    read = dict(read_file(tmp_path / "x.safetensors"))
    assert {n: (t.dtype, t.shape) for n, t in read.items()} == {
        "a": (DType.F32, (2, 3)),
        "b": (DType.BOOL, (1,)),
        "c": (DType.BF16, (2,)),
    }
    assert all(t.offset % t.dtype.item_bytes == 0 for t in read.values())


@given(st.lists(st.tuples(st.sampled_from(DType), st.lists(st.integers(0, 5), max_size=3)), max_size=12))
def test_tensors_lie_aligned_one_beside_the_other_and_the_library_agrees(drawn: list[tuple[DType, list[int]]]) -> None:
    specs = [TensorSpec(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(drawn)]
    header, begins = header_of(specs)
    end = len(header)
    for begin, spec in sorted(zip(begins, specs, strict=True), key=lambda p: (p[0], p[1].byte_count)):
        assert begin % spec.dtype.item_bytes == 0
        assert begin == end
        end += spec.byte_count
    LIBRARY.deserialize(header + bytes(end - len(header)))


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
from tests.unit.test_checkpoints import NAME, CheckpointWriter, head, tensors_of
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


# ---- what is refused on reading -----------------------------------------------------------------


def _edit(place: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((place / MANIFEST_NAME).read_text())
    change(content)
    (place / MANIFEST_NAME).write_text(json.dumps(content))


def _set(*path: Any) -> Callable[[Path], None]:
    """Set the value at the path of keys that comes before it."""

    def spoil(place: Path) -> None:
        def change(content: Any) -> None:
            for key in path[:-2]:
                content = content[key]
            content[path[-2]] = path[-1]

        _edit(place, change)

    return spoil


def _text(text: str) -> Callable[[Path], None]:
    def spoil(place: Path) -> None:
        (place / MANIFEST_NAME).write_text(text)

    return spoil


def _link_to_manifest(place: Path) -> None:
    (place / MANIFEST_NAME).rename(place.parent / "elsewhere.json")
    (place / MANIFEST_NAME).symlink_to(place.parent / "elsewhere.json")


def _link_to_directory(place: Path) -> None:
    place.rename(place.parent / "elsewhere")
    place.symlink_to("elsewhere")


def _fifo(place: Path) -> None:
    (place / MANIFEST_NAME).unlink()
    os.mkfifo(place / MANIFEST_NAME)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda place: place.rename(place.parent / "gone"), "No such file"),
        (lambda place: (place / MANIFEST_NAME).unlink(), "No such file"),
        (_link_to_directory, "Not a directory|symbolic links"),
        (_link_to_manifest, "symbolic links"),
        (_fifo, "is no file"),
        (_text(""), "not understood"),
        (_text("[]"), "not understood"),
        (_text("[" * 100_000), "not understood"),
        (_text("{}"), "not understood"),
        (_set("format_version", 2), "format version 2, this reads 1"),
        (_set("run_id", 7), "not understood"),
        (_set("version", {"term": -1, "number": 1}), "not understood"),
        (_set("version", {"term": True, "number": 1}), "not understood"),
        (_set("step", "7"), "not understood"),
        (_set("layout", "tensors", 0, "name", "other"), "not the one that its layout digest names"),
        (_set("layout", "tensors", 1, "shape", [7, 5]), "not the one that its layout digest names"),
        (_set("layout", "tensors", 0, "name", "embed"), "stands twice"),
        (_set("layout", "tensors", 0, "dtype", "F4"), "not understood"),
        (_set("layout", "tensors", 0, "checksum", "00" * 8), "not those that its content digest names"),
        (_set("layout", "tensors", 0, "checksum", "00"), "a checksum has 8 bytes"),
        (_set("content_digest", "00" * 32), "not those that its content digest names"),
        (_set("files", []), "names 0 files"),
        (_set("files", ["a", "a"]), "names 2 files"),
        (_set("files", ["../x"]), "no name of a file in it: '../x'"),
        (_set("files", ["/etc/passwd"]), "no name of a file in it"),
    ],
)
def test_a_manifest_that_is_none_or_contradicts_itself_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    write(tmp_path)
    spoil(tmp_path / NAME)
    with pytest.raises(CheckpointUnreadable, match=says):
        read_manifest(tmp_path, NAME)


def test_a_manifest_without_limits_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr(reading, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointUnreadable, match=r"has \d+ bytes"):
        read_manifest(tmp_path, NAME)


def _first(place: Path) -> Path:
    return sorted(place.glob("*.safetensors"))[0]


def _last(place: Path) -> Path:
    return sorted(place.glob("*.safetensors"))[-1]


def _link_file(place: Path) -> None:
    _last(place).rename(place.parent / "elsewhere")
    _last_link = place / "model-00003-of-00003.safetensors"
    _last_link.symlink_to(place.parent / "elsewhere")


def _foreign(*specs: TensorSpec) -> Callable[[Path], None]:
    def spoil(place: Path) -> None:
        header, _ = header_of(specs)
        _first(place).write_bytes(header + bytes(sum(s.byte_count for s in specs)))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda place: _last(place).unlink(), "No such file"),
        (lambda place: os.truncate(_last(place), _last(place).stat().st_size - 1), "cut short"),
        (lambda place: os.truncate(_last(place), 4), "cut short"),
        (_link_file, "symbolic links"),
        (_foreign(TensorSpec("alien", DType.U8, (3,))), "alien is not in the layout"),
        (_foreign(TensorSpec("flags", DType.U8, (3,))), r"flags is U8 \[3\], the manifest says BOOL \[3\]"),
        (_foreign(), "hold 4 of 5 tensors"),
        (_foreign(*LAYOUT.tensors[:2]), "hold 5 of 5 tensors, in 6 places"),
    ],
)
def test_files_that_are_not_what_the_manifest_says_are_refused(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    manifest = write(tmp_path)
    spoil(tmp_path / NAME)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointUnreadable, match=says):
        open_files(tmp_path, NAME, manifest)
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    manifest = write(tmp_path)
    read_manifest(tmp_path, NAME)
    for file in open_files(tmp_path, NAME, manifest):
        file.close()
    with CheckpointWriter(tmp_path, "policy-8", **head(tensors_of(seed=2))) as given_up:
        given_up.write(0, tensors_of(seed=2)["flags"])
    assert len(os.listdir("/proc/self/fd")) == before
    assert entries(tmp_path) == [NAME]


def test_a_checkpoint_needs_neither_torch_nor_grpc() -> None:
    heavy = {"torch", "numpy", "grpc", "google", "safetensors"}
    code = f"import sys, controlplane.checkpoints; print({heavy} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "set()"


def test_stored_tensors_say_where_their_bytes_are(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    file = tmp_path / NAME / manifest.files[0]
    stored = dict(read_file(file))
    assert isinstance(stored["flags"], StoredTensor)
    flags = stored["flags"]
    assert file.read_bytes()[flags.offset : flags.offset + flags.byte_count] == tensors_of()["flags"]

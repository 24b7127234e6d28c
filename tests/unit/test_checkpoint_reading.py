"""What is read of a checkpoint is what was written, or a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from controlplane.checkpoints import MANIFEST_NAME, CheckpointWriter, open_files, read_manifest, reading
from controlplane.core.errors import CheckpointUnreadable
from controlplane.core.layout import DType, TensorSpec
from controlplane.tensor_files import StoredTensor, header_of, read_file
from tests.support.written_checkpoints import LAYOUT, NAME, VERSION, entries, head, read_back, tensors_of, write

LIBRARY: Any = safetensors


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

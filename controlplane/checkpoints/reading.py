"""Reading a checkpoint: only what lies inside the root.

A name has no slash, and neither the directory nor a file in it may be a symbolic link. Bytes are believed only by their
checksums, which is for whoever reads them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from controlplane.checkpoints.manifest import MANIFEST_NAME, NAME, CheckpointManifest, parse
from controlplane.core.errors import CheckpointUnreadable
from controlplane.core.layout import Layout
from controlplane.tensor_files import StoredTensor, TensorFileError, read_descriptor

MAX_MANIFEST_BYTES = 512 << 20
"""A million tensors' names, shapes and checksums."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class CheckpointFile:
    """One of a checkpoint's files, open. Whoever has it closes it."""

    name: str
    descriptor: int
    size: int
    tensors: tuple[tuple[int, StoredTensor], ...]
    """What lies in it: index into the layout, and where."""

    def close(self) -> None:
        os.close(self.descriptor)


def read_manifest(root: Path, name: str) -> CheckpointManifest:
    """What the checkpoint says of itself; contradictions are refused. No tensor's byte is read.

    Raises:
        CheckpointUnreadable: it is not there, not inside the root, not a checkpoint, or contradicts itself.
    """
    with _directory(root, name) as directory:
        descriptor, size = _open(name, directory, MANIFEST_NAME)
        try:
            if size > MAX_MANIFEST_BYTES:
                raise CheckpointUnreadable(name, f"{MANIFEST_NAME} has {size} bytes")
            with os.fdopen(os.dup(descriptor), "rb") as file:
                text = file.read(MAX_MANIFEST_BYTES)
        except OSError as error:
            raise CheckpointUnreadable(name, f"{MANIFEST_NAME}: {error.strerror or error}") from error
        finally:
            os.close(descriptor)
    return parse(name, text)


def open_files(root: Path, name: str, manifest: CheckpointManifest) -> list[CheckpointFile]:
    """Its files, open, so that they stay readable if the checkpoint is deleted meanwhile. Headers were checked
    against the layout: each tensor lies whole in exactly one of them.

    Raises:
        CheckpointUnreadable: a file is missing, cut short, a link, or holds something else.
    """
    indexes = {spec.name: i for i, spec in enumerate(manifest.layout.tensors)}
    files: list[CheckpointFile] = []
    try:
        with _directory(root, name) as directory:
            for file in manifest.files:  # one by one: those that are open are closed if a later one is not
                files.append(_opened(name, directory, file, indexes, manifest.layout))  # noqa: PERF401
        _check_covered(name, files, manifest.layout)
    except BaseException:
        for opened in files:
            opened.close()
        raise
    return files


def _opened(name: str, directory: int, file: str, indexes: Mapping[str, int], layout: Layout) -> CheckpointFile:
    descriptor, size = _open(name, directory, file)
    try:
        tensors = [
            (_index(name, stored, tensor, indexes, layout), stored)
            for tensor, stored in read_descriptor(descriptor, Path(file))
        ]
    except TensorFileError as error:
        os.close(descriptor)
        raise CheckpointUnreadable(name, str(error)) from error
    except BaseException:
        os.close(descriptor)
        raise
    return CheckpointFile(file, descriptor, size, tuple(sorted(tensors, key=lambda t: t[0])))


def _index(name: str, stored: StoredTensor, tensor: str, indexes: Mapping[str, int], layout: Layout) -> int:
    index = indexes.get(tensor)
    if index is None:
        raise CheckpointUnreadable(name, f"{stored.file}: {tensor} is not in the layout")
    spec = layout.tensors[index]
    if (stored.dtype, stored.shape) != (spec.dtype, spec.shape):
        is_there = f"{stored.dtype.name} {list(stored.shape)}"
        raise CheckpointUnreadable(
            name, f"{stored.file}: {tensor} is {is_there}, the manifest says {spec.dtype.name} {list(spec.shape)}"
        )
    return index


def _check_covered(name: str, files: list[CheckpointFile], layout: Layout) -> None:
    seen = sorted(index for file in files for index, _ in file.tensors)
    if seen != list(range(len(layout.tensors))):
        cause = f"its files hold {len(set(seen))} of {len(layout.tensors)} tensors, in {len(seen)} places"
        raise CheckpointUnreadable(name, cause)


@contextmanager
def _directory(root: Path, name: str) -> Iterator[int]:
    """A descriptor of the checkpoint's directory: inside the root, and no link."""
    if NAME.fullmatch(name) is None:
        raise CheckpointUnreadable(name, "that is no name of a checkpoint")
    try:
        descriptor = os.open(root / name, _READ | os.O_DIRECTORY)
    except OSError as error:
        raise CheckpointUnreadable(name, _problem(error)) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open(name: str, directory: int, file: str) -> tuple[int, int]:
    """A regular file of the directory, and its size."""
    try:
        descriptor = os.open(file, _READ | os.O_NONBLOCK, dir_fd=directory)
    except OSError as error:
        raise CheckpointUnreadable(name, f"{file}: {_problem(error)}") from error
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise CheckpointUnreadable(name, f"{file} is no file")
    return descriptor, info.st_size


def _problem(error: OSError) -> str:
    return f"{error.strerror or error}"

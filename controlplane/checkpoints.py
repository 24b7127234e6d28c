"""Checkpoints: a version of a model in a directory that engines can read, whole and named by its content.

`ROOT/NAME/` holds safetensors files and `weightplane.json`, which says what they are: version, layout, and each
tensor's checksum. Trainer agents write them, engine agents read them; neither needs torch. Everything here blocks:
call it in a thread.

Written: into a directory with a hidden name, synced, then renamed, so a crash leaves nothing half under a
checkpoint's name. A name that is there with the same content is done; with other content it is refused, never
replaced. What a dead writer left is removed by the next one.

Read: only what lies inside the root. A name has no slash, and neither the directory nor a file in it may be a
symbolic link. A manifest that contradicts itself is refused; bytes are believed only by their checksums.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from controlplane.core.errors import CheckpointUnreadable, LayoutInvalid
from controlplane.core.layout import (
    CHECKSUM_BYTES,
    MODEL_ONLY,
    DType,
    Layout,
    Target,
    TargetKind,
    TensorSpec,
    Tie,
    content_digest,
)
from controlplane.core.versions import ModelName, RunId, Term, WeightVersion
from controlplane.tensor_files import StoredTensor, TensorFileError, header_of, read_descriptor

MANIFEST_NAME = "weightplane.json"
FORMAT_VERSION = 1
"""Grows when an older reader could misunderstand a manifest."""
SHARD_BYTES = 1 << 30
"""Tensors' bytes in one file, about; a tensor is never split."""
MAX_MANIFEST_BYTES = 512 << 20
"""A million tensors' names, shapes and checksums."""
MAX_FILES = 65536
"""As the contract's own limit."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_SCRATCH = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")


class CheckpointNotWritten(Exception):
    """A checkpoint could not be written: the disk is full, the root is not there, or the name is another's.

    Nothing is left under its name. Local to the writer: no call answers with it.
    """

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(f"checkpoint {name} was not written: {cause}")
        self.name = name
        self.cause = cause


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint is."""

    run_id: RunId
    model: ModelName
    version: WeightVersion
    step: int | None
    """The trainer's step, for people."""
    layout: Layout
    content_digest: bytes
    checksums: tuple[bytes, ...]
    """XXH3_64 of each tensor, in layout order."""
    files: tuple[str, ...]
    """Names of the safetensors files, in order."""


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


# ---- reading ------------------------------------------------------------------------------------


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
    return _parsed(name, text)


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
    if _NAME.fullmatch(name) is None:
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


def _parsed(name: str, text: bytes) -> CheckpointManifest:
    try:
        return _manifest(name, json.loads(text))
    except LayoutInvalid as error:
        raise CheckpointUnreadable(name, f"{MANIFEST_NAME}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointUnreadable(name, f"{MANIFEST_NAME} is not understood: {error!r}") from error


def _manifest(name: str, content: dict[str, Any]) -> CheckpointManifest:
    if content["format_version"] != FORMAT_VERSION:
        raise CheckpointUnreadable(
            name, f"it has format version {content['format_version']!r}, this reads {FORMAT_VERSION}"
        )
    layout = _layout(content["layout"])
    checksums = tuple(bytes.fromhex(t["checksum"]) for t in content["layout"]["tensors"])
    version = content["version"]
    manifest = CheckpointManifest(
        run_id=RunId(_text(content["run_id"])),
        model=ModelName(_text(content["model"])),
        version=WeightVersion(number=_whole(version["number"]), term=Term(_whole(version["term"]))),
        step=None if content["step"] is None else _whole(content["step"]),
        layout=layout,
        content_digest=bytes.fromhex(content["content_digest"]),
        checksums=checksums,
        files=tuple(_text(f) for f in content["files"]),
    )
    _check_consistent(name, manifest, bytes.fromhex(content["layout_digest"]))
    return manifest


def _check_consistent(name: str, manifest: CheckpointManifest, layout_digest: bytes) -> None:
    files = manifest.files
    if manifest.layout.digest != layout_digest:
        raise CheckpointUnreadable(name, "its layout is not the one that its layout digest names")
    if any(len(c) != CHECKSUM_BYTES for c in manifest.checksums):
        raise CheckpointUnreadable(name, f"a checksum has {CHECKSUM_BYTES} bytes")
    if content_digest(manifest.checksums) != manifest.content_digest:
        raise CheckpointUnreadable(name, "its checksums are not those that its content digest names")
    if not 0 < len(files) <= MAX_FILES or len(set(files)) != len(files):
        raise CheckpointUnreadable(name, f"it names {len(files)} files, {len(set(files))} of them different")
    strange = [f for f in files if _NAME.fullmatch(f) is None or f == MANIFEST_NAME]
    if strange:
        raise CheckpointUnreadable(name, f"that is no name of a file in it: {strange[0]!r}")


def _layout(content: dict[str, Any]) -> Layout:
    return Layout(
        tensors=tuple(_tensor(t) for t in content["tensors"]),
        ties=tuple(Tie(alias=_text(t["alias"]), source=_text(t["source"])) for t in content["ties"]),
        format=_text(content["format"]),
    )


def _tensor(content: dict[str, Any]) -> TensorSpec:
    targets = tuple(
        Target(kind=TargetKind(t["kind"]), adapter=_text(t.get("adapter", ""))) for t in content.get("targets", ())
    )
    return TensorSpec(
        name=_text(content["name"]),
        dtype=DType[content["dtype"]],
        shape=tuple(_whole(d) for d in content["shape"]),
        targets=targets or MODEL_ONLY,
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected a whole number, got {value!r}")
    return value


# ---- writing ------------------------------------------------------------------------------------


def write_checkpoint(
    root: Path,
    name: str,
    *,
    run_id: RunId,
    model: ModelName,
    version: WeightVersion,
    step: int | None,
    layout: Layout,
    content_digest: bytes,
    tensors: Iterable[tuple[str, bytes | memoryview]],
    shard_bytes: int = SHARD_BYTES,
) -> CheckpointManifest:
    """Write a whole version; `tensors` are its names and bytes, in layout order, and are not asked for if it is there.

    Raises:
        CheckpointNotWritten: the disk is full, the name is taken by other content, or the bytes are not the version's.
    """
    writer = CheckpointWriter(
        root,
        name,
        run_id=run_id,
        model=model,
        version=version,
        step=step,
        layout=layout,
        content_digest=content_digest,
        shard_bytes=shard_bytes,
    )
    with writer:
        if writer.present is not None:
            return writer.present
        for index, (tensor, data) in enumerate(tensors):
            if index >= len(layout.tensors) or layout.tensors[index].name != tensor:
                raise CheckpointNotWritten(name, f"tensor {index} of the layout is not {tensor}")
            writer.write(index, data)
        return writer.commit()


class CheckpointWriter:
    """Writes one checkpoint as its bytes come. A context: leaving it without `commit` leaves nothing behind.

    From one thread at a time.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        *,
        run_id: RunId,
        model: ModelName,
        version: WeightVersion,
        step: int | None,
        layout: Layout,
        content_digest: bytes,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Makes the root if it is missing, removes what dead writers left there, and reserves nothing else.

        Raises CheckpointNotWritten: the name is taken by other content, or the root cannot be written.
        """
        if _NAME.fullmatch(name) is None:
            raise CheckpointNotWritten(name, "that is no name of a checkpoint")
        self._root, self._name = root, name
        self._run_id, self._model, self._version, self._step = run_id, model, version, step
        self._layout, self._digest = layout, content_digest
        self._scratch: Path | None = None
        self._lock = -1
        self._shards: list[_Shard] = []
        self._places: dict[int, tuple[_Shard, int]] = {}
        self._sums = [xxhash.xxh3_64() for _ in layout.tensors]
        self._written = [0] * len(layout.tensors)
        self.present: CheckpointManifest | None = None
        """The checkpoint, if it was there already with this content: nothing need be written."""
        with self._mapped():
            root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(root)
            self.present = self._already_there()
            if self.present is None:
                self._begin(shard_bytes)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, tensor: int, data: bytes | memoryview) -> None:
        """The next bytes of a tensor. Tensors come in any order, a tensor's bytes from its first on.

        Raises CheckpointNotWritten.
        """
        spec, done = self._layout.tensors[tensor], self._written[tensor]
        with memoryview(data) as view, view.cast("B") as flat:
            if done + len(flat) > spec.byte_count:
                raise CheckpointNotWritten(
                    self._name, f"{spec.name} has {spec.byte_count} bytes, {done + len(flat)} came"
                )
            shard, begin = self._places[tensor]
            with self._mapped():
                shard.write(begin + done, flat)
            self._sums[tensor].update(flat)
            self._written[tensor] = done + len(flat)

    def commit(self) -> CheckpointManifest:
        """Make it a checkpoint: synced, then under its name in one step.

        Raises CheckpointNotWritten: bytes are missing, or are not those that the content digest names.
        """
        if self.present is not None:
            return self.present
        missing = [t.name for t, n in zip(self._layout.tensors, self._written, strict=True) if n != t.byte_count]
        if missing:
            raise CheckpointNotWritten(self._name, f"{len(missing)} tensors are not whole, such as {missing[0]}")
        checksums = tuple(s.digest() for s in self._sums)
        if content_digest(checksums) != self._digest:
            raise CheckpointNotWritten(self._name, "the bytes written are not those of the version")
        manifest = CheckpointManifest(
            run_id=self._run_id,
            model=self._model,
            version=self._version,
            step=self._step,
            layout=self._layout,
            content_digest=self._digest,
            checksums=checksums,
            files=tuple(s.path.name for s in self._shards),
        )
        with self._mapped():
            self._publish(manifest)
        self.present = manifest
        return manifest

    def close(self) -> None:
        """Remove what was not committed. Idempotent."""
        for shard in self._shards:
            shard.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _already_there(self) -> CheckpointManifest | None:
        if not os.path.lexists(self._root / self._name):
            return None
        try:
            manifest = read_manifest(self._root, self._name)
            for file in open_files(self._root, self._name, manifest):
                file.close()
        except CheckpointUnreadable as error:
            raise CheckpointNotWritten(self._name, f"something else has its name: {error.cause}") from error
        theirs = (manifest.run_id, manifest.model, manifest.layout.digest, manifest.content_digest)
        if theirs != (self._run_id, self._model, self._layout.digest, self._digest):
            what = f"{manifest.model} {manifest.version} of run {manifest.run_id}"
            raise CheckpointNotWritten(self._name, f"it is there with other content: {what}")
        return manifest

    def _begin(self, shard_bytes: int) -> None:
        self._scratch, self._lock = _make_scratch(self._root, self._name)
        groups = _grouped(self._layout, shard_bytes)
        try:
            for number, group in enumerate(groups, 1):
                header, begins = header_of([self._layout.tensors[i] for i in group])
                file = f"model-{number:05}-of-{len(groups):05}.safetensors"
                shard = _Shard(self._scratch / file, header)
                self._shards.append(shard)
                self._places.update({i: (shard, begin) for i, begin in zip(group, begins, strict=True)})
        except BaseException:
            self.close()
            raise

    def _publish(self, manifest: CheckpointManifest) -> None:
        assert self._scratch is not None
        for shard in self._shards:
            shard.finish()
        with (self._scratch / MANIFEST_NAME).open("xb") as file:
            file.write(_to_json(manifest))
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(self._scratch)
        try:
            self._scratch.rename(self._root / self._name)
        except OSError:
            if self._already_there() is None:  # else another writer was faster, with the same
                raise
            return
        self._scratch = None
        _sync_directory(self._root)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointNotWritten(self._name, error.strerror or str(error)) from error
        except TensorFileError as error:
            raise CheckpointNotWritten(self._name, str(error)) from error


class _Shard:
    """One file under way."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        self._descriptor = -1
        self._header = header

    def write(self, offset: int, data: memoryview) -> None:
        if self._descriptor < 0:
            self._open()
        while data:
            done = os.pwrite(self._descriptor, data, offset)
            data, offset = data[done:], offset + done

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.write(0, memoryview(self._header))

    def finish(self) -> None:
        if self._descriptor < 0:  # all of its tensors are empty
            self._open()
        os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _grouped(layout: Layout, shard_bytes: int) -> list[list[int]]:
    groups: list[list[int]] = []
    size = 0
    for index, tensor in enumerate(layout.tensors):
        if not groups or size + tensor.byte_count > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += tensor.byte_count
    return groups


def _make_scratch(root: Path, name: str) -> tuple[Path, int]:
    """A directory of one's own under a name that no checkpoint can have, and the lock that says its writer lives."""
    while True:
        path = root / f".{name}.{uuid.uuid4().hex}.tmp"
        path.mkdir()
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # a file system without locks: then nobody removes what is left over
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # between the two steps somebody took it for a dead writer's


def _remove_leftovers(root: Path) -> None:
    """Scratch directories whose writers are gone: the kernel let their locks go."""
    for path in root.iterdir():
        if _SCRATCH.fullmatch(path.name) is None:
            continue
        with suppress(OSError):
            lock = os.open(path, _READ | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _to_json(manifest: CheckpointManifest) -> bytes:
    content = {
        "format_version": FORMAT_VERSION,
        "run_id": manifest.run_id,
        "model": manifest.model,
        "version": {"term": manifest.version.term, "number": manifest.version.number},
        "step": manifest.step,
        "layout_digest": manifest.layout.digest.hex(),
        "content_digest": manifest.content_digest.hex(),
        "files": list(manifest.files),
        "layout": {
            "format": manifest.layout.format,
            "ties": [{"alias": t.alias, "source": t.source} for t in manifest.layout.ties],
            "tensors": [
                _tensor_to_json(t, c) for t, c in zip(manifest.layout.tensors, manifest.checksums, strict=True)
            ],
        },
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _tensor_to_json(tensor: TensorSpec, checksum: bytes) -> dict[str, object]:
    content: dict[str, object] = {
        "name": tensor.name,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "checksum": checksum.hex(),
    }
    if tensor.targets != MODEL_ONLY:
        content["targets"] = [{"kind": t.kind.value, "adapter": t.adapter} for t in tensor.targets]
    return content


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

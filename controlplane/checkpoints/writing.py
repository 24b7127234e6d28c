"""Writing a checkpoint: into a directory with a hidden name, synced, then renamed.

A crash leaves nothing half under a checkpoint's name. A name that is there with the same content is done; with other
content it is refused, never replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from controlplane.checkpoints.keeping import make_scratch, remove_leftovers
from controlplane.checkpoints.manifest import MANIFEST_NAME, NAME, CheckpointManifest, to_json
from controlplane.checkpoints.reading import open_files, read_manifest
from controlplane.core.errors import CheckpointUnreadable
from controlplane.core.layout import Layout, content_digest
from controlplane.core.versions import ModelName, RunId, WeightVersion
from controlplane.tensor_files import TensorFileError, header_of
from controlplane.whole_files import sync_directory

SHARD_BYTES = 1 << 30
"""Tensors' bytes in one file, about; a tensor is never split."""


class CheckpointNotWritten(Exception):
    """A checkpoint could not be written: the disk is full, the root is not there, or the name is another's.

    Nothing is left under its name. Local to the writer: no call answers with it.
    """

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(f"checkpoint {name} was not written: {cause}")
        self.name = name
        self.cause = cause


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
        if NAME.fullmatch(name) is None:
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
            remove_leftovers(root)
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
        self._scratch, self._lock = make_scratch(self._root, self._name)
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
            file.write(to_json(manifest))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self._scratch)
        try:
            self._scratch.rename(self._root / self._name)
        except OSError:
            if self._already_there() is None:  # else another writer was faster, with the same
                raise
            return
        self._scratch = None
        sync_directory(self._root)

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

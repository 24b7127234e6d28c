"""Checkpoint: a directory of safetensors files that this host can read, opened once and read in place.

Files are kept by their descriptors, so they stay readable when the checkpoint is deleted meanwhile; workers map them
through this process's descriptor table. No byte is copied. The agent reads with pread: a file cut short under its
feet is a refusal, not a signal. safetensors aligns tensors for their dtypes, as workers need it; a file that does
not is refused.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from controlplane.checkpoints import CheckpointFile, CheckpointManifest, open_files
from controlplane.core.assembly import Record
from controlplane.core.errors import CheckpointUnreadable, FrameInvalid
from controlplane.core.layout import Layout
from engine_agent.engine import Placement, SegmentSpan, StagedWeights
from engine_agent.receivers.port import Buffer, require_equal, require_open

READ_BYTES = 4 << 20
"""Read and summed at once; between two such steps an attempt that was ended is noticed."""


class CheckpointReceiver:
    """By reference; nobody's memory waits for it. `close` never waits for a read: a disk may hang."""

    releases_at_once = True
    quick = False
    keeps = True

    def __init__(self, root: Path, name: str, manifest: CheckpointManifest) -> None:
        self._root = root
        self._name = name
        self._manifest = manifest
        self._layout: Layout = manifest.layout
        self._files: list[CheckpointFile] = []
        self._places: dict[int, Placement] = {}
        self._guard = threading.Lock()
        """Held for moments only."""
        self._readers = 0
        self._closed = False

    def open(self) -> list[tuple[list[Record], int]]:
        """Open its files. For each, in order: its tensors as one chunk's records, and its size.

        Raises CheckpointUnreadable, UpdateAborted.
        """
        with self._reading():
            files = open_files(self._root, self._name, self._manifest)
            with self._guard:
                self._files = files
            return [(self._records(number, file), file.size) for number, file in enumerate(files)]

    def _records(self, chunk: int, file: CheckpointFile) -> list[Record]:
        records = []
        for index, stored in file.tensors:
            if stored.offset % stored.dtype.item_bytes:
                spec = self._layout.tensors[index]
                raise CheckpointUnreadable(self._name, f"{file.name}: {spec.name} is not aligned for {spec.dtype.name}")
            self._places[index] = Placement(chunk, stored.offset)
            records.append(Record(index, 0, stored.offset, stored.byte_count, self._manifest.checksums[index]))
        return records

    def place(self, records: Sequence[Record], buffers: Sequence[Buffer]) -> None:
        """Its bytes are where they are: no writer sends any."""
        raise FrameInvalid("Chunk", "buffers", "a checkpoint is read by the engine agent; no chunk is sent")

    def check(self, tensor: int, expected: bytes) -> None:
        place, left = self._places[tensor], self._layout.tensors[tensor].byte_count
        checksum, offset = xxhash.xxh3_64(), place.offset
        with self._reading():
            file = self._files[place.chunk]
            while left:
                require_open(self._closed)
                block = self._read(file, min(left, READ_BYTES), offset)
                checksum.update(block)
                left, offset = left - len(block), offset + len(block)
        require_equal(self._layout, tensor, expected, checksum.digest())

    def _read(self, file: CheckpointFile, size: int, offset: int) -> bytes:
        try:
            block = os.pread(file.descriptor, size, offset)
        except OSError as error:
            raise CheckpointUnreadable(self._name, f"{file.name}: {error.strerror or error}") from error
        if not block:
            raise CheckpointUnreadable(self._name, f"{file.name}: cut short while it was read")
        return block

    def staged(self, label: str) -> StagedWeights:
        spans = [SegmentSpan(f"/proc/{os.getpid()}/fd/{f.descriptor}", 0, f.size) for f in self._files]
        placements = [self._places[i] for i in range(len(self._layout.tensors))]
        return StagedWeights(layout=self._layout, label=label, chunks={"": spans}, placements=placements)

    def installed(self) -> None:
        """Its memory is not this side's."""

    def close(self) -> None:
        """At once where nothing reads; else whoever reads notices, and closes the files as it leaves."""
        with self._guard:
            self._closed = True
            self._close_unless_read()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._guard:
            require_open(self._closed)
            self._readers += 1
        try:
            yield
        finally:
            with self._guard:
                self._readers -= 1
                if self._closed:
                    self._close_unless_read()

    def _close_unless_read(self) -> None:
        if self._readers:
            return
        files, self._files = self._files, []
        for file in files:
            file.close()

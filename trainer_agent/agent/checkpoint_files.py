"""A checkpoint's files: a version that lies in a leader's segments becomes one, and goes. Everything here blocks.

Promises: what is written is the version, by its content digest; a name carries its run, model, number and content, so
that no other content ever has it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from controlplane.checkpoints import CheckpointManifest, CheckpointNotWritten, CheckpointWriter, read_manifest
from controlplane.core.errors import CheckpointUnreadable
from controlplane.core.layout import Layout
from controlplane.core.versions import ModelName, RunId, WeightVersion
from controlplane.rpc.codec import version_from_proto
from trainer_agent.agent.frames import SegmentReader
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2

log = structlog.get_logger(__name__)

PIECE_BYTES = 16 * 1024 * 1024
"""Read and written at once."""
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")
_NAME_PART_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Whole:
    """A version that lies whole in a leader's segments."""

    run_id: str
    model: str
    state: fleet_pb2.UpdateState
    """As the coordinator decided."""
    term: int
    layout: Layout
    content_digest: bytes
    chunks: Sequence[rank_pb2.SendChunk]

    @property
    def version(self) -> WeightVersion:
        return version_from_proto(self.state.version)

    @property
    def name(self) -> str:
        content = self.content_digest[:6].hex()
        return f"{prefix_of(self.run_id, self.model)}{self.version.number:08}-{content}"


def write(root: Path, whole: Whole, stop: threading.Event) -> CheckpointManifest | None:
    """Write a version from its leader's segments. Blocks; None: `stop` was set before it was whole.

    Raises:
        CheckpointNotWritten: the disk is full, the root cannot be written, or the bytes are not the version's.
        SegmentUnreadable: the leader's memory is gone.
    """
    reader = SegmentReader()
    try:
        with CheckpointWriter(
            root,
            whole.name,
            run_id=RunId(whole.run_id),
            model=ModelName(whole.model),
            version=whole.version,
            step=whole.state.step if whole.state.HasField("step") else None,
            layout=whole.layout,
            content_digest=whole.content_digest,
        ) as writer:
            if writer.present is not None:
                return writer.present
            for tensor, data in _pieces(whole, reader):
                if stop.is_set():
                    return None
                writer.write(tensor, data)
            return None if stop.is_set() else writer.commit()
    finally:
        reader.close()


def _pieces(whole: Whole, reader: SegmentReader) -> Iterator[tuple[int, bytes]]:
    """Each tensor's bytes, in order. Of a slot with several devices each buffer holds the same: the first will do."""
    for chunk in whole.chunks:
        if not chunk.buffers or not chunk.buffers[0].HasField("shared_memory"):
            raise CheckpointNotWritten(whole.name, "its bytes are in no memory of this host")
        place = chunk.buffers[0].shared_memory
        for record in chunk.records:
            for done in range(0, record.byte_count, PIECE_BYTES):
                size = min(record.byte_count - done, PIECE_BYTES)
                yield record.tensor, reader.read(place, record.buffer_offset + done, size)


def remove(root: Path, name: str) -> None:
    """Delete a checkpoint: gone in one step, so that a crash in the middle leaves what the next writer clears away."""
    scratch = root / f".{name}.{uuid.uuid4().hex}.tmp"
    with suppress(FileNotFoundError):
        (root / name).rename(scratch)
        shutil.rmtree(scratch, ignore_errors=True)


def identity(root: Path, name: str) -> tuple[str, str, int] | None:
    """Run, model and number, as its manifest says; None: it is no checkpoint."""
    try:
        manifest = read_manifest(root, name)
    except CheckpointUnreadable as error:
        log.info("no_checkpoint", name=name, cause=error.cause)
        return None
    return manifest.run_id, manifest.model, manifest.version.number


def prefix_of(run_id: str, model: str) -> str:
    """What the names of a model's checkpoints begin with. Names that are alike after the cutting differ by the sum."""
    parts = [_FOREIGN.sub("_", text)[:_NAME_PART_LENGTH] for text in (run_id, model)]
    whole = hashlib.sha256(f"{run_id}\0{model}".encode()).hexdigest()[:8]
    return f"wp-{parts[0]}-{parts[1]}-{whole}-"

"""A checkpoint's files: a version that lies in a leader's segments becomes one.

Promises: what is written is the version, by its content digest; a name carries its run, model, number and content, so
that no other content ever has it. Segments are mapped before anything else: from then on they stay as they are,
whatever becomes of their names, if nobody writes into them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from controlplane import failpoints
from controlplane.checkpoints import CheckpointManifest, CheckpointNotWritten, CheckpointWriter, prefix_of
from controlplane.core.layout import Layout
from controlplane.core.versions import ModelName, RunId, WeightVersion
from controlplane.rpc.codec import version_from_proto
from trainer_agent.agent.frames import SegmentReader
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2

PIECE_BYTES = 16 * 1024 * 1024
"""Read and written at once."""


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


def hold(whole: Whole) -> SegmentReader:
    """Map every segment that the version lies in. Of a slot with several devices each holds the same.

    Raises:
        CheckpointNotWritten: it lies in no memory of this host. SegmentUnreadable: the leader's memory is gone.
    """
    reader = SegmentReader()
    try:
        for chunk in whole.chunks:
            if not chunk.buffers or not chunk.buffers[0].HasField("shared_memory"):
                raise CheckpointNotWritten(whole.name, "its bytes are in no memory of this host")
            reader.read(chunk.buffers[0].shared_memory, 0, 0)
    except BaseException:
        reader.close()
        raise
    return reader


def write(root: Path, whole: Whole, reader: SegmentReader, stop: threading.Event) -> CheckpointManifest | None:
    """Write a version from its held segments, and let go of them. Blocks; None: `stop` was set before it was whole.

    Raises:
        CheckpointNotWritten: the disk is full, the root cannot be written, or the bytes are not the version's.
        SegmentUnreadable: a segment is shorter than was announced.
    """
    try:
        with _writer(root, whole) as writer:
            if writer.present is not None:
                return writer.present
            for count, (tensor, data) in enumerate(_pieces(whole, reader)):
                if stop.is_set():
                    return None
                writer.write(tensor, data)
                failpoints.hit("trainer.mid_checkpoint", count)
            return None if stop.is_set() else writer.commit()
    finally:
        reader.close()


def _writer(root: Path, whole: Whole) -> CheckpointWriter:
    return CheckpointWriter(
        root,
        whole.name,
        run_id=RunId(whole.run_id),
        model=ModelName(whole.model),
        version=whole.version,
        step=whole.state.step if whole.state.HasField("step") else None,
        layout=whole.layout,
        content_digest=whole.content_digest,
    )


def _pieces(whole: Whole, reader: SegmentReader) -> Iterator[tuple[int, bytes]]:
    """Each tensor's bytes, in order."""
    for chunk in whole.chunks:
        place = chunk.buffers[0].shared_memory
        for record in chunk.records:
            for done in range(0, record.byte_count, PIECE_BYTES):
                size = min(record.byte_count - done, PIECE_BYTES)
                yield record.tensor, reader.read(place, record.buffer_offset + done, size)

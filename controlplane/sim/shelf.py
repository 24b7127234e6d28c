"""Checkpoints on a file system that trainers and engines share; what lies there may go, or change, unannounced."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from controlplane.core import engine_events as ee
from controlplane.core.assembly import Record
from controlplane.core.fleet_records import CheckpointKept
from controlplane.core.layout import Layout
from controlplane.core.versions import ModelName, WeightVersion
from controlplane.sim.frames import ChunkFrame
from controlplane.sim.settings import checksum, digest_of


@dataclass(frozen=True, slots=True)
class Written:
    """A directory of files, one tensor each."""

    layout: Layout
    content: int

    @property
    def file_count(self) -> int:
        return len(self.layout.tensors)

    def frame(self, index: int, version: WeightVersion) -> ChunkFrame:
        size = self.layout.tensors[index].byte_count
        record = Record(index, 0, 0, size, checksum(self.content, index))
        event = partial(ee.ChunkArrived, version=version, index=index, records=(record,), buffer_bytes=size)
        return ChunkFrame(event, {index: self.content})

    def kept(self, model: ModelName, version: WeightVersion, name: str) -> CheckpointKept:
        """What its writer says of it."""
        return CheckpointKept(
            model,
            version,
            name,
            self.layout.digest,
            digest_of(self.content),
            len(self.layout.tensors),
            self.file_count,
            self.layout.byte_count,
        )


class Shelf:
    """By name."""

    def __init__(self) -> None:
        self._written: dict[str, Written] = {}

    def put(self, name: str, written: Written) -> None:
        self._written[name] = written

    def get(self, name: str) -> Written | None:
        return self._written.get(name)

    def remove(self, name: str) -> None:
        self._written.pop(name, None)

    def names(self) -> list[str]:
        return list(self._written)

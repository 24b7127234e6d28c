"""Shared memory: the sender's segments are mapped and read in place. No byte is copied before the install.

A segment is opened once and kept by its descriptor, so it stays readable when the sender dies and its name is
removed; workers reach it through this process's descriptor table. It stays mapped for the next update, which most
often comes in the same one (`engine_agent.kept_maps`).
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from controlplane.core.assembly import Record
from controlplane.core.errors import ByteCountMismatch, DeviceHandlesMissing, FrameInvalid, SegmentUnreadable
from controlplane.core.layout import Layout
from engine_agent.engine import Placement, SegmentSpan, StagedPart, StagedWeights
from engine_agent.kept_maps import KeptMaps, MappedFile
from engine_agent.receivers.port import Buffer, require_equal, require_open

SHARED_MEMORY = Path("/dev/shm")
ANY_DEVICE = ""


@dataclass(frozen=True, slots=True)
class _Segment:
    """One segment, open."""

    name: str
    file: MappedFile


@dataclass
class _Device:
    """What one device's workers read, in the order in which segments appeared."""

    kept: KeptMaps
    segments: list[_Segment] = field(default_factory=list)

    def index_of(self, name: str) -> int:
        for i, segment in enumerate(self.segments):
            if segment.name == name:
                return i
        self.segments.append(_Segment(name, _open(name, self.kept)))
        return len(self.segments) - 1


class SharedMemoryReceiver:
    """By reference: the sender's memory is free only when the update is over."""

    releases_at_once = False
    quick = True  # a segment is mapped without its pages: those of few bytes are as few
    keeps = False
    by_chunk = False

    def __init__(
        self, layout: Layout, host_id: str, device_uuids: tuple[str, ...], kept: KeptMaps | None = None
    ) -> None:
        """`kept`: where segments of earlier updates are found, and these go in the end."""
        self._layout = layout
        self._kept = kept or KeptMaps()
        self._keeps = kept is not None
        self._host_id = host_id
        self._wanted = device_uuids
        self._devices: dict[str, _Device] = {}
        self._placements: list[Placement | None] = [None] * len(layout.tensors)
        self._in_use = threading.Lock()
        self._closed = False

    def place(self, records: Sequence[Record], buffers: Sequence[Buffer]) -> None:
        self._check_devices([b.device_uuid for b in buffers])
        with self._in_use:
            require_open(self._closed)
            places = {self._reach(b) for b in buffers}
        if len(places) != 1:
            raise FrameInvalid("Chunk", "buffers", "every device's buffer must lie at the same place of its segments")
        segment, offset = places.pop()
        for record in records:
            self._note(record, Placement(segment, offset + record.buffer_offset))

    def check(self, tensor: int, expected: bytes) -> None:
        place, size = self._placed(tensor), self._layout.tensors[tensor].byte_count
        with self._in_use:
            require_open(self._closed)
            for device in self._devices.values():
                with memoryview(device.segments[place.chunk].file.map) as view:
                    got = xxhash.xxh3_64_digest(view[place.offset : place.offset + size])
                require_equal(self._layout, tensor, expected, got)

    def staged(self, label: str) -> StagedWeights:
        placements = [self._placed(i) for i in range(len(self._placements))]
        return StagedWeights(layout=self._layout, label=label, chunks=self._spans(), placements=placements)

    def part(self, tensors: Sequence[int]) -> StagedPart:
        return StagedPart(self._spans(), tensors, [self._placed(t) for t in tensors])

    def forget(self, tensors: Sequence[int]) -> None:
        """The memory is the sender's."""

    def _spans(self) -> dict[str, list[SegmentSpan]]:
        return {
            uuid: [SegmentSpan(f"/proc/{os.getpid()}/fd/{s.file.descriptor}", 0, s.file.size) for s in device.segments]
            for uuid, device in self._devices.items()
        }

    def installed(self) -> None:
        """Its memory is not this side's."""

    def close(self) -> None:
        with self._in_use:
            self._closed = True
            devices, self._devices = self._devices, {}
            if not self._keeps:
                self._kept.close()
            self._kept.give_back(segment.file for device in devices.values() for segment in device.segments)

    def _check_devices(self, given: list[str]) -> None:
        """G2: every worker finds a buffer for its device."""
        missing = [] if ANY_DEVICE in given else [d for d in self._wanted if d not in given]
        if missing:
            raise DeviceHandlesMissing(engine_id="this engine", missing=missing)

    def _reach(self, buffer: Buffer) -> tuple[int, int]:
        """Which segment of the device, and where in it. Opens it if it is new."""
        if not buffer.segment:
            raise FrameInvalid("Chunk", "buffers", "the shared_memory transport has its bytes in segments")
        if buffer.host_id != self._host_id:
            raise SegmentUnreadable(segment=buffer.segment, cause=f"it lives on host {buffer.host_id}")
        device = self._devices.setdefault(buffer.device_uuid, _Device(self._kept))
        index = device.index_of(buffer.segment)
        end = buffer.offset + buffer.byte_count
        size = device.segments[index].file.size
        if end > size:
            raise ByteCountMismatch(what=f"segment {buffer.segment}", expected=end, got=size)
        return index, buffer.offset

    def _note(self, record: Record, place: Placement) -> None:
        """A tensor that goes over chunks must still lie in one piece: it is not copied together here."""
        if record.tensor_offset == 0:
            self._placements[record.tensor] = place
            return
        first = self._placed(record.tensor)
        if place != Placement(first.chunk, first.offset + record.tensor_offset):
            raise FrameInvalid("TensorRecord", "buffer_offset", "a tensor's parts must follow one another in memory")

    def _placed(self, tensor: int) -> Placement:
        place = self._placements[tensor]
        if place is None:
            raise FrameInvalid("TensorRecord", "tensor_offset", f"tensor {tensor} does not begin at its first byte")
        return place


def _open(name: str, kept: KeptMaps) -> MappedFile:
    """Raises SegmentUnreadable. The name's form was checked by the schema: it cannot leave the directory."""
    try:
        descriptor = os.open(SHARED_MEMORY / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentUnreadable(segment=name, cause=error.strerror or str(error)) from error
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_size == 0:
        os.close(descriptor)
        raise SegmentUnreadable(segment=name, cause="it is no segment with bytes")
    return kept.take(descriptor)

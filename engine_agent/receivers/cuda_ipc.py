"""cuda_ipc: chunks lie in device memory of the slot's ranks, which the engine's workers opened when the update was.

The agent initialises no CUDA and reads none of it: it sees to it that every worker has a range of what it opened, and
hands each chunk on as it comes. The workers copy, compare the checksums, and install; then the half is free (INV-12).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from controlplane.core.assembly import Record
from controlplane.core.errors import DeviceHandlesMissing, FrameInvalid
from controlplane.core.layout import Layout
from controlplane.device_memory.ranges import ExportedProbe, ExportedRange
from engine_agent.engine import DeviceChunk, StagedPart, StagedWeights
from engine_agent.receivers.port import Buffer, require_open


class CudaIpcReceiver:
    """For streaming updates only: a chunk at a time."""

    releases_at_once = True
    quick = True
    keeps = False
    by_chunk = True

    def __init__(self, layout: Layout, device_uuids: tuple[str, ...], opened: Sequence[ExportedProbe]) -> None:
        """`opened`: what the workers have open."""
        self._layout = layout
        self._wanted = device_uuids
        self._opened = {p.range.device_uuid: replace(p.range, offset=0, byte_count=0) for p in opened}
        self._ranges: dict[str, ExportedRange] = {}
        self._records: Sequence[Record] = ()
        self._checksums: dict[int, bytes] = {}
        self._in_use = threading.Lock()
        self._closed = False

    def place(self, records: Sequence[Record], buffers: Sequence[Buffer]) -> None:
        ranges = {b.device.device_uuid: b.device for b in buffers if b.device is not None}
        missing = [d for d in self._wanted if d not in ranges]
        if missing:
            raise DeviceHandlesMissing(engine_id="this engine", missing=missing)
        for r in ranges.values():
            self._require_open_there(r)
        with self._in_use:
            require_open(self._closed)
            self._ranges, self._records, self._checksums = ranges, records, {}

    def check(self, tensor: int, expected: bytes) -> None:
        """The worker that has the bytes compares them."""
        self._checksums[tensor] = expected

    def part(self, tensors: Sequence[int]) -> StagedPart:
        with self._in_use:
            require_open(self._closed)
            return StagedPart({}, tensors, (), DeviceChunk(self._ranges, self._records, self._checksums))

    def forget(self, tensors: Sequence[int]) -> None:
        """The memory is the sender's."""

    def staged(self, label: str) -> StagedWeights:
        raise NotImplementedError("device memory is installed as it comes: no version waits in it")

    def installed(self) -> None:
        """Its memory is not this side's."""

    def close(self) -> None:
        with self._in_use:
            self._closed = True

    def _require_open_there(self, r: ExportedRange) -> None:
        """Raises FrameInvalid: it is no range of what this device's worker has open."""
        if self._opened.get(r.device_uuid) != replace(r, offset=0, byte_count=0):
            raise FrameInvalid("Chunk", "buffers", f"the update opened with no export {r.export_id} of {r.device_uuid}")
        if not r.inside:
            problem = f"{r.byte_count} bytes at {r.offset} are not in {r.buffer_bytes}"
            raise FrameInvalid("Chunk", "buffers", problem)

"""Device memory of a rank, exported to workers on the same device: two halves for chunks, and a probe beside them.

A handle names an allocation of the driver's, so the whole of it is allocated once, exported once and opened once, over
any number of updates; which half a chunk lies in is an offset. The probe is written once and never again, so that
whoever opens late still finds it.

Promises: an allocation of which it is not known that every worker has let go is neither written nor freed again
(INV-12): it is set aside, and another one takes its place under another id. Not more than MAX_ASIDE are: then
IPC_NOT_POSSIBLE, and the plan takes another way.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

import torch
import xxhash

from controlplane.core.errors import IpcNotPossible
from controlplane.device_memory.cuda import CudaMemory
from controlplane.device_memory.port import DeviceMemory, DeviceMemoryError, Exported
from controlplane.device_memory.ranges import ExportedProbe, ExportedRange
from trainer_agent.rank.devices import current_device
from trainer_agent.rank.memory import RING_CHUNKS

PROBE_BYTES = 1 << 20
MAX_ASIDE = 2
"""Each holds two chunks and the probe of the device's memory until the process ends."""

devices: DeviceMemory = CudaMemory()
"""What this process exports by."""


class DeviceRing:
    """Room for two chunks on one device, and the probe behind it."""

    def __init__(self, memory: DeviceMemory, room_bytes: int, device_uuid: str) -> None:
        """Raises DeviceMemoryError: there is no such memory, or it cannot be exported."""
        self.room_bytes = room_bytes
        self._memory = memory
        self._device_uuid = device_uuid
        self._export_id = secrets.token_hex(16)
        self._size = RING_CHUNKS * room_bytes + PROBE_BYTES
        self._exported: Exported = memory.export(self._size, device_uuid)
        self.probe = self._write_probe()
        self.written = -1
        """The chunk of this push that was written last."""

    def write(self, index: int, chunk: torch.Tensor) -> ExportedRange:
        """Bring the chunk into its half, once for all who read it; it lies there when this returns.

        Raises DeviceMemoryError.
        """
        start = index % RING_CHUNKS * self.room_bytes
        if self.written != index:
            self._exported.memory[start : start + len(chunk)].copy_(chunk)
            self._memory.synchronise(self._device_uuid)
            self.written = index
        return self._range(start, len(chunk))

    def free(self) -> None:
        """Nobody has it open, or this process ends. Raises DeviceMemoryError."""
        self._exported.free()

    def _write_probe(self) -> ExportedProbe:
        data, start = os.urandom(PROBE_BYTES), RING_CHUNKS * self.room_bytes
        self._exported.memory[start:].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._memory.synchronise(self._device_uuid)
        return ExportedProbe(self._range(start, PROBE_BYTES), xxhash.xxh3_64_digest(data))

    def _range(self, offset: int, byte_count: int) -> ExportedRange:
        return ExportedRange(
            device_uuid=self._device_uuid,
            export_id=self._export_id,
            handle=self._exported.handle,
            buffer_bytes=self._size,
            offset=offset,
            byte_count=byte_count,
            torch_version=str(torch.__version__),
        )


class DeviceRings:
    """The ring of one rank, from push to push: one for all engines that read its device."""

    def __init__(self, memory: DeviceMemory | None = None) -> None:
        self._memory = memory or devices
        self._ring: DeviceRing | None = None
        self._aside: list[DeviceRing] = []
        self._taken = False
        """By the push under way."""
        self._in_doubt = False
        """Somebody may still read it."""

    def acquire(self, room_bytes: int, engine_ids: str) -> DeviceRing:
        """The ring for a push whose chunks need no more room than that. Raises IpcNotPossible."""
        if self._ring is not None and self._taken:
            return self._ring
        if self._ring is not None and (self._in_doubt or self._ring.room_bytes < room_bytes):
            self._aside.append(self._ring)
            self._ring = None
        device = current_device()
        if len(self._aside) > MAX_ASIDE:
            cause = f"{len(self._aside)} exports of this rank may still be open in engines"
            raise IpcNotPossible(engine_id=engine_ids, device_uuid=device, cause=cause)
        try:
            self._ring = self._ring or DeviceRing(self._memory, room_bytes, device)
        except DeviceMemoryError as error:
            raise IpcNotPossible(engine_id=engine_ids, device_uuid=device, cause=str(error)) from error
        self._ring.written = -1
        self._taken = self._in_doubt = True
        return self._ring

    def settle(self, *, free: bool) -> None:
        """A push is over. `free`: no worker reads the halves any more (INV-12)."""
        self._in_doubt, self._taken = self._taken and not free, False

    def close(self) -> None:
        """The rank leaves. The driver keeps what others have open until they let go."""
        for ring in filter(None, (self._ring, *self._aside)):
            with suppress(DeviceMemoryError):
                ring.free()
        self._ring, self._aside = None, []

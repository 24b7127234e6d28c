"""Inside a worker: device memory that a rank on the same device exported, opened, and chunks in it made to tensors.

Promises: an export is opened once, however many updates come in it, and closed when others take its place; fields of
another torch are refused; nothing is unpickled. A chunk is copied into memory of the worker's own and the device is
waited for before `take` returns, so that the half may be written again (INV-12); a tensor is handed out whole, and its
checksum compared before. Only a worker calls this: the agent never initialises CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import torch
import xxhash

from controlplane.core.errors import ChecksumMismatch, IpcNotPossible
from controlplane.device_memory.port import DeviceMemory, DeviceMemoryError, Opened
from controlplane.device_memory.ranges import ExportedProbe, ExportedRange

Place = tuple[int, int, int, int]
"""Of a record: tensor, its offset there, its offset in the chunk, bytes."""


class OpenedExports:
    """What one worker has open: the export of the rank on its device, at most."""

    def __init__(self, memory: DeviceMemory, engine_id: str) -> None:
        self._memory = memory
        self.engine_id = engine_id
        self._export_id = ""
        self._opened: Opened | None = None

    def open(self, probe: ExportedProbe) -> None:
        """Have this one open, and the probe found in it as it was written; what else was is closed.

        Raises IpcNotPossible: nothing is open then.
        """
        if self._opened is not None and self._export_id == probe.range.export_id:
            return
        self.close()
        refuse = self._refusal(probe.range)
        _check(probe.range, refuse)
        try:
            self._opened = self._memory.open(probe.range.handle, probe.range.buffer_bytes, probe.range.device_uuid)
            self._export_id = probe.range.export_id
            found = _checksum(self.view(probe.range))
        except (DeviceMemoryError, RuntimeError) as error:
            self.close()
            raise refuse(str(error).partition("\n")[0]) from error
        if found != probe.checksum:
            self.close()
            raise refuse("the probe has other bytes than were written")

    def view(self, r: ExportedRange) -> torch.Tensor:
        """The bytes, in place. Raises IpcNotPossible: that export is not open."""
        refuse = self._refusal(r)
        if self._opened is None or r.export_id != self._export_id:
            raise refuse(f"export {r.export_id} is not open")
        _check(r, refuse)
        return self._opened.memory[r.offset : r.offset + r.byte_count]

    def settled(self, r: ExportedRange) -> None:
        """Return when nothing of what was asked of the device reads the range any more. Raises IpcNotPossible."""
        try:
            self._memory.synchronise(r.device_uuid)
        except DeviceMemoryError as error:
            raise self._refusal(r)(str(error)) from error

    def close(self) -> None:
        """Let go. Idempotent."""
        opened, self._opened, self._export_id = self._opened, None, ""
        if opened is not None:
            with suppress(DeviceMemoryError):  # the driver lets go with the process
                opened.close()

    def _refusal(self, r: ExportedRange) -> Callable[[str], IpcNotPossible]:
        return lambda cause: IpcNotPossible(engine_id=self.engine_id, device_uuid=r.device_uuid, cause=cause)


def _check(r: ExportedRange, refuse: Callable[[str], IpcNotPossible]) -> None:
    """Raises IpcNotPossible."""
    if r.torch_version != torch.__version__:
        raise refuse(f"the export is of torch {r.torch_version}, this worker has {torch.__version__}")
    if not r.inside:
        raise refuse(f"{r.byte_count} bytes at {r.offset} are not in {r.buffer_bytes}")


def _checksum(data: torch.Tensor) -> bytes:
    """Of a copy on the host: XXH3_64 is a processor's."""
    digest: bytes = xxhash.xxh3_64_digest(data.cpu().numpy().data)
    return digest


class ArrivingTensors:
    """Tensors of one streaming install, as their bytes come. Holds those of which some bytes came, and no other."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """In layout order; bytes of each."""
        self._names = names
        self._sizes = sizes
        self._partial: dict[int, torch.Tensor] = {}

    def take(
        self, exports: OpenedExports, r: ExportedRange, places: Sequence[Place], checksums: Mapping[int, bytes]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensors that are whole with this chunk, as bytes that are the receiver's. The chunk's half is not read
        any more when the first one comes, or the iteration ends.

        Raises IpcNotPossible, ChecksumMismatch.
        """
        view = exports.view(r)
        for tensor, tensor_offset, offset, byte_count in places:
            target = self._partial.get(tensor)
            if target is None:
                target = self._partial[tensor] = torch.empty(self._sizes[tensor], dtype=torch.uint8, device=view.device)
            target[tensor_offset : tensor_offset + byte_count].copy_(view[offset : offset + byte_count])
        exports.settled(r)
        del view
        for tensor, expected in checksums.items():
            whole = self._partial.pop(tensor)
            got = _checksum(whole)
            if got != expected:
                raise ChecksumMismatch(name=self._names[tensor], expected=expected.hex(), got=got.hex())
            yield tensor, whole

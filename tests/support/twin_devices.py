"""A twin of a device's memory for hosts without a GPU: named shared memory between real processes.

It refuses what CUDA refuses, with CUDA's words: an opening in the process that exported, a second one in one process,
of another device, from another host, and of what was freed. What it cannot show is that the driver does the same.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import struct
from pathlib import Path

import torch

from controlplane.device_memory.port import DeviceMemoryError
from controlplane.devices import host_id

HANDLE = struct.Struct("<Q16s20s20s")
"""Exporter, name, device, host: 64 bytes, as CUDA's."""
PREFIX = "weightplane-twin-"


class TwinMemory:
    """See `controlplane.device_memory.port.DeviceMemory`: a process has one of it."""

    def __init__(self, host: str = "", missing: str = "") -> None:
        """`host`: where the process is, if not here. `missing`: why it has no such memory."""
        self._host = host or host_id()
        self._missing = missing
        self._open: set[bytes] = set()

    def why_not(self) -> str:
        return self._missing

    def export(self, byte_count: int, device_uuid: str) -> TwinExport:
        if self._missing:
            raise DeviceMemoryError(self._missing)
        name = secrets.token_hex(8).encode()
        return TwinExport(HANDLE.pack(os.getpid(), name, _short(device_uuid), _short(self._host)), byte_count)

    def open(self, handle: bytes, byte_count: int, device_uuid: str) -> TwinOpened:
        exporter, _, device, host = HANDLE.unpack(handle)
        if exporter == os.getpid():
            raise DeviceMemoryError("cudaIpcOpenMemHandle: invalid device context (201)")
        if handle in self._open:
            raise DeviceMemoryError("cudaIpcOpenMemHandle: resource already mapped (208)")
        if device != _short(device_uuid):
            raise DeviceMemoryError("cudaIpcOpenMemHandle: invalid device ordinal (101)")
        if host != _short(self._host):
            raise DeviceMemoryError("cudaIpcOpenMemHandle: invalid resource handle (400)")
        opened = TwinOpened(self._open, handle, byte_count)
        self._open.add(handle)
        return opened

    def synchronise(self, device_uuid: str) -> None:
        """What a processor writes is written."""


class TwinExport:
    def __init__(self, handle: bytes, byte_count: int) -> None:
        self.handle = handle
        self._path = path_of(handle)
        self.memory = torch.frombuffer(_map(self._path, byte_count, os.O_CREAT | os.O_EXCL), dtype=torch.uint8)

    def free(self) -> None:
        self._path.unlink(missing_ok=True)


class TwinOpened:
    def __init__(self, others: set[bytes], handle: bytes, byte_count: int) -> None:
        self._others = others
        self._handle = handle
        try:
            self.memory = torch.frombuffer(_map(path_of(handle), byte_count, 0), dtype=torch.uint8)
        except OSError as error:
            raise DeviceMemoryError("cudaIpcOpenMemHandle: invalid argument (1)") from error

    def close(self) -> None:
        self._others.discard(self._handle)


def path_of(handle: bytes) -> Path:
    exporter, name, *_ = HANDLE.unpack(handle)
    return Path("/dev/shm", f"{PREFIX}{exporter}-{name.decode()}")


def own_exports() -> list[Path]:
    """What this process exported and did not free: other runs of tests have their own."""
    return list(Path("/dev/shm").glob(f"{PREFIX}{os.getpid()}-*"))


def _map(path: Path, byte_count: int, flags: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        if flags:
            os.ftruncate(descriptor, byte_count)
        return mmap.mmap(descriptor, byte_count)
    finally:
        os.close(descriptor)


def _short(text: str) -> bytes:
    return hashlib.sha1(text.encode(), usedforsecurity=False).digest()

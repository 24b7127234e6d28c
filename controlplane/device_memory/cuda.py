"""CUDA behind the port: plain `cudaMalloc`, its IPC handle, and the opening of one, in the runtime that torch brought.

torch's allocator is passed by on purpose. Its blocks lie in segments that it may expand, which the driver does not
export, and that a memory saver may take away while a worker reads; an allocation of its own is neither. The runtime's
library is asked for by its handle, so that nothing that was put before it catches the call.

Refuses a device that this process does not see. NOT RUN on hosts without a GPU: `tests/gpu` does it where there is one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from controlplane.core.names import device_uuid as named
from controlplane.device_memory.port import DeviceMemoryError, Exported, Opened

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
"""The one flag of cudaIpcOpenMemHandle."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Bytes:
    """Device memory as torch takes it over without a copy."""

    def __init__(self, pointer: int, byte_count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (byte_count,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


class CudaMemory:
    """See `port.DeviceMemory`."""

    def __init__(self) -> None:
        self._runtime_or_none: Any = None

    def why_not(self) -> str:
        if torch.version.cuda is None:
            return "torch was built without CUDA"
        return "" if torch.cuda.is_available() else "the process has no CUDA device"

    def export(self, byte_count: int, device_uuid: str) -> Exported:
        return _Exported(self, byte_count, self._index_of(device_uuid))

    def open(self, handle: bytes, byte_count: int, device_uuid: str) -> Opened:
        if len(handle) != HANDLE_BYTES:
            raise DeviceMemoryError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        return _Opened(self, handle, byte_count, self._index_of(device_uuid))

    def synchronise(self, device_uuid: str) -> None:
        try:
            torch.cuda.synchronize(self._index_of(device_uuid))
        except RuntimeError as error:
            raise DeviceMemoryError(_first_line(error)) from error

    def call(self, name: str, *arguments: Any) -> None:
        """One function of the runtime. Raises DeviceMemoryError: it did not succeed."""
        code = getattr(self._runtime, name)(*arguments)
        if code:
            self._runtime.cudaGetLastError()  # else the next call of torch's would raise what was refused here
            text = self._runtime.cudaGetErrorString(code)
            raise DeviceMemoryError(f"{name}: {text.decode()} ({code})")

    def _index_of(self, uuid: str) -> int:
        """This process's number of the device: numbers differ between processes (G9)."""
        if cause := self.why_not():
            raise DeviceMemoryError(cause)
        for index in range(torch.cuda.device_count()):
            if named(str(torch.cuda.get_device_properties(index).uuid)) == named(uuid):
                return index
        raise DeviceMemoryError("the process does not see the device")

    @property
    def _runtime(self) -> Any:
        if self._runtime_or_none is None:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            try:
                runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
            except OSError as error:
                raise DeviceMemoryError(_first_line(error)) from error
            runtime.cudaGetErrorString.restype = ctypes.c_char_p
            runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
            self._runtime_or_none = runtime
        return self._runtime_or_none


class _Exported:
    def __init__(self, cuda: CudaMemory, byte_count: int, index: int) -> None:
        self._cuda, self._index = cuda, index
        self._pointer, handle = ctypes.c_void_p(), _Handle()
        with torch.cuda.device(index):
            cuda.call("cudaMalloc", ctypes.byref(self._pointer), ctypes.c_size_t(byte_count))
            try:
                cuda.call("cudaIpcGetMemHandle", ctypes.byref(handle), self._pointer)
            except DeviceMemoryError:
                self.free()
                raise
        self.handle = bytes(handle.reserved)
        self.memory = torch.as_tensor(_Bytes(int(self._pointer.value or 0), byte_count), device=f"cuda:{index}")

    def free(self) -> None:
        pointer, self._pointer = self._pointer, ctypes.c_void_p()
        if pointer.value:
            with torch.cuda.device(self._index):
                self._cuda.call("cudaFree", pointer)


class _Opened:
    def __init__(self, cuda: CudaMemory, handle: bytes, byte_count: int, index: int) -> None:
        self._cuda, self._index = cuda, index
        self._pointer = ctypes.c_void_p()
        given = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
        with torch.cuda.device(index):
            cuda.call("cudaIpcOpenMemHandle", ctypes.byref(self._pointer), given, LAZY_PEER_ACCESS)
        self.memory = torch.as_tensor(_Bytes(int(self._pointer.value or 0), byte_count), device=f"cuda:{index}")

    def close(self) -> None:
        pointer, self._pointer = self._pointer, ctypes.c_void_p()
        if pointer.value:
            with torch.cuda.device(self._index):
                self._cuda.call("cudaIpcCloseMemHandle", pointer)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

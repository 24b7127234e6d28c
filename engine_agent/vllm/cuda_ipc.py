"""Inside a worker: device memory that a rank on the same device exported, opened.

Promises: an exported buffer is opened once, however many chunks come in it; fields of another torch are refused, since
their format is torch's own. Nothing is unpickled. Only a worker calls this: the agent never initialises CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from controlplane.core.errors import IpcNotPossible
from controlplane.core.names import device_uuid
from weightplane.v1 import layout_pb2


class OpenedBuffers:
    """What one worker has open."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._opened: dict[bytes, torch.Tensor] = {}

    def bytes_of(self, handle: layout_pb2.BufferHandle) -> torch.Tensor:
        """The chunk's bytes, in place. Raises IpcNotPossible."""
        r = handle.cuda_ipc
        refuse = self._refusal(handle.device_uuid)
        if r.torch_version != torch.__version__:
            raise refuse(f"the handle is of torch {r.torch_version}, this worker has {torch.__version__}")
        if r.offset + r.byte_count > r.buffer_bytes:
            raise refuse(f"{r.byte_count} bytes at {r.offset} are not in {r.buffer_bytes}")
        if r.memory_handle not in self._opened:
            self._opened[r.memory_handle] = _open(r, _index_of(handle.device_uuid, refuse), refuse)
        return self._opened[r.memory_handle][r.offset : r.offset + r.byte_count]

    def close(self) -> None:
        """Let go of all of them; the exporter's count of readers goes down."""
        self._opened.clear()

    def _refusal(self, uuid: str) -> Callable[[str], IpcNotPossible]:
        return lambda cause: IpcNotPossible(engine_id=self._engine_id, device_uuid=uuid, cause=cause)


def _index_of(uuid: str, refuse: Callable[[str], IpcNotPossible]) -> int:
    """This process's number of the device: numbers differ between processes (G9)."""
    if not torch.cuda.is_available():
        raise refuse("this worker has no CUDA device")
    for index in range(torch.cuda.device_count()):
        if device_uuid(str(torch.cuda.get_device_properties(index).uuid)) == device_uuid(uuid):
            return index
    raise refuse("this worker does not see the device")


def _open(r: layout_pb2.CudaIpcRange, index: int, refuse: Callable[[str], IpcNotPossible]) -> torch.Tensor:
    storage_of: Any = torch.UntypedStorage
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage = storage_of._new_shared_cuda(
            index,
            r.memory_handle,
            r.buffer_bytes,
            r.buffer_offset,
            r.ref_counter_handle,
            r.ref_counter_offset,
            r.event_handle,
            r.event_sync_required,
        )
    except RuntimeError as error:
        raise refuse(str(error).partition("\n")[0]) from error
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)

"""Device memory of a rank, exported to the worker on the same device: two halves for chunks, one export for both.

A handle names an allocation of the driver's, so the whole buffer is allocated once, exported once and opened once;
which half a chunk lies in is an offset. Allocations that the driver cannot export (expandable segments) are refused:
IPC_NOT_POSSIBLE, with the cause.

The planner never picks this way while no engine states it: nothing here is called by a push yet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from controlplane.core.errors import IpcNotPossible
from trainer_agent.rank.memory import RING_CHUNKS
from weightplane.v1 import layout_pb2

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class DeviceRing:
    """Room for two chunks on one device."""

    def __init__(self, room_bytes: int, device: torch.device, engine_id: str, device_uuid: str) -> None:
        """Raises IpcNotPossible: there is no such memory, or it cannot be exported."""
        self._engine_id = engine_id
        self._device_uuid = device_uuid
        self.room_bytes = room_bytes
        self._require_exportable(device, os.environ)
        self.memory = torch.empty(RING_CHUNKS * room_bytes, dtype=torch.uint8, device=device)
        self._exported = self._export()

    def place(self, index: int) -> int:
        """Where chunk `index` starts."""
        return index % RING_CHUNKS * self.room_bytes

    def range_of(self, index: int, byte_count: int) -> layout_pb2.BufferHandle:
        """The handle of a chunk."""
        handle = layout_pb2.BufferHandle(device_uuid=self._device_uuid)
        handle.cuda_ipc.CopyFrom(self._exported)
        handle.cuda_ipc.offset, handle.cuda_ipc.byte_count = self.place(index), byte_count
        return handle

    def _export(self) -> layout_pb2.CudaIpcRange:
        storage: Any = self.memory.untyped_storage()
        try:
            _, handle, size, offset, counter, counter_offset, event, sync = storage._share_cuda_()
        except RuntimeError as error:
            raise self._refused(str(error).partition("\n")[0]) from error
        return layout_pb2.CudaIpcRange(
            memory_handle=handle,
            buffer_bytes=size,
            buffer_offset=offset,
            ref_counter_handle=counter,
            ref_counter_offset=counter_offset,
            event_handle=event,
            event_sync_required=sync,
            torch_version=torch.__version__,
        )

    def _require_exportable(self, device: torch.device, environment: Mapping[str, str]) -> None:
        for name in ALLOCATOR_VARIABLES:
            if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
                raise self._refused(f"{name} asks for expandable segments, which the driver does not export")
        if device.type != "cuda" or not torch.cuda.is_available():
            raise self._refused("the rank has no CUDA device")

    def _refused(self, cause: str) -> IpcNotPossible:
        return IpcNotPossible(engine_id=self._engine_id, device_uuid=self._device_uuid, cause=cause)

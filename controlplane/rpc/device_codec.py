"""Exported device memory, from and into the schema."""

from __future__ import annotations

from controlplane.device_memory.ranges import ExportedProbe, ExportedRange
from weightplane.v1 import layout_pb2


def range_to_proto(r: ExportedRange) -> layout_pb2.BufferHandle:
    """The handle of a chunk."""
    cuda = layout_pb2.CudaIpcRange(
        memory_handle=r.handle,
        buffer_bytes=r.buffer_bytes,
        buffer_offset=0,
        offset=r.offset,
        byte_count=r.byte_count,
        torch_version=r.torch_version,
        export_id=r.export_id,
    )
    return layout_pb2.BufferHandle(device_uuid=r.device_uuid, cuda_ipc=cuda)


def range_from_proto(handle: layout_pb2.BufferHandle) -> ExportedRange:
    cuda = handle.cuda_ipc
    return ExportedRange(
        device_uuid=handle.device_uuid,
        export_id=cuda.export_id,
        handle=cuda.memory_handle,
        buffer_bytes=cuda.buffer_bytes,
        offset=cuda.offset,
        byte_count=cuda.byte_count,
        torch_version=cuda.torch_version,
    )


def probe_to_proto(probe: ExportedProbe) -> layout_pb2.DeviceExport:
    return layout_pb2.DeviceExport(probe=range_to_proto(probe.range), probe_checksum=probe.checksum)


def probe_from_proto(export: layout_pb2.DeviceExport) -> ExportedProbe:
    return ExportedProbe(range_from_proto(export.probe), export.probe_checksum)

"""CUDA handles, as far as a host without a GPU can tell: what is refused, and that nothing is tried before."""

from __future__ import annotations

import pytest
import torch

from controlplane.core.errors import IpcNotPossible
from engine_agent.vllm.cuda_ipc import OpenedBuffers
from trainer_agent.rank.cuda_ipc import DeviceRing
from weightplane.v1 import layout_pb2

UUID = "GPU-6f1e9f3a-0000-0000-0000-000000000001"


def handle(**changed: object) -> layout_pb2.BufferHandle:
    values = {
        "memory_handle": b"h" * 64,
        "buffer_bytes": 1024,
        "buffer_offset": 0,
        "offset": 0,
        "byte_count": 512,
        "torch_version": torch.__version__,
    }
    return layout_pb2.BufferHandle(device_uuid=UUID, cuda_ipc=layout_pb2.CudaIpcRange(**values | changed))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a host without a GPU says")
def test_a_host_without_a_gpu_says_that_it_has_none() -> None:
    with pytest.raises(IpcNotPossible, match=f"e0 cannot open memory of device {UUID}: this worker has no CUDA device"):
        OpenedBuffers("e0").bytes_of(handle())
    with pytest.raises(IpcNotPossible, match="the rank has no CUDA device"):
        DeviceRing(1 << 20, torch.device("cpu"), "e0", UUID)


def test_a_handle_of_another_torch_is_refused_with_both_versions() -> None:
    with pytest.raises(IpcNotPossible, match=rf"of torch 1\.0, this worker has {torch.__version__.split('+')[0]}"):
        OpenedBuffers("e0").bytes_of(handle(torch_version="1.0"))


def test_a_range_outside_of_its_buffer_is_refused_with_both_numbers() -> None:
    with pytest.raises(IpcNotPossible, match="512 bytes at 600 are not in 1024"):
        OpenedBuffers("e0").bytes_of(handle(offset=600))


def test_expandable_segments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(IpcNotPossible, match="expandable segments"):
        DeviceRing(1 << 20, torch.device("cuda"), "e0", UUID)

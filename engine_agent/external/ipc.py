"""The last hop of device memory: typed handles as vLLM's own IPC engine takes them over HTTP, a pickle in base64.

vLLM unpickles what it gets there, and it has no other form; so this goes over loopback, from this agent to its own
server, and never further. The agent opens no handle and initialises no CUDA: it puts torch's tuple together and sends
it. Names, dtypes and shapes pass through as the layout has them.

vLLM's IPC engine keeps no promise of ours inside its workers: it opens a reload when a session starts, and cannot take
one back. A session that fails leaves a mixture which no later update is known to heal, so that server must go.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.core.errors import InstallFailed, IpcNotPossible
from controlplane.core.layout import Layout, TensorSpec
from controlplane.core.names import device_uuid
from engine_agent.engine import InstallReport, StagedWeights
from engine_agent.vllm.install import MIXTURE, Installer
from engine_agent.vllm.mapping import DTYPES
from weightplane.v1 import layout_pb2


@dataclass(frozen=True, slots=True)
class TensorHandle:
    """One whole tensor in device memory."""

    tensor: int
    """Index into the layout."""
    ranges: Sequence[layout_pb2.BufferHandle]
    """`cuda_ipc` ranges of exactly its bytes: one for each device of the engine."""


class IpcInstaller(Installer):
    """Installs into a server whose workers run vLLM's IPC engine. Only in parts: what came cannot be put back."""

    _came: frozenset[int] = frozenset()
    """Tensors of the install under way."""

    async def install(self, staged: StagedWeights) -> InstallReport:
        cause = "this server takes handles of device memory, and no staged bytes"
        raise InstallFailed(self._core.engine_id, staged.label, False, cause)

    async def install_handles(self, handles: Sequence[TensorHandle]) -> None:
        """The tensors of one chunk. Raises IpcNotPossible, InstallFailed, EngineDied.

        INV-12: vLLM keeps references until a module is whole, so memory is free only when the install is over.
        """
        whole = self._under_way()
        info = update_info(self._core.engine_id, whole.layout, handles, self._device_uuids)
        await self._step(whole, self._ask(self._core.llm.update_weights(self._core.update_request(info)), "update"))
        self._came |= {h.tensor for h in handles}

    async def begin_streaming(self, layout: Layout, label: str) -> None:
        self._came = frozenset()
        await super().begin_streaming(layout, label)

    async def _tell_layout(self, staged: StagedWeights) -> None:
        self._touching = True  # the session itself takes the model to pieces
        # Before that, so that one that breaks off, however, leaves a server that says so to whoever comes next.
        await self._ask(self._core.llm.update_weight_version(MIXTURE), "update_weight_version")
        request = self._core.init_request({"packed": False})
        await self._ask(self._core.llm.init_weight_transfer_engine(request), "init_weight_transfer_engine")

    async def _told(self, whole: StagedWeights, step: dict[str, Any]) -> int:
        """vLLM's engine has no steps: it began with the session, and ends with it."""
        if step["step"] == "finish" and len(self._came) < len(whole.layout.tensors):
            missing = [t.name for i, t in enumerate(whole.layout.tensors) if i not in self._came]
            raise await self._failed(whole, f"{len(missing)} tensors did not come: {missing[:5]}", touched=True)
        return len(self._came)


def update_info(
    engine_id: str, layout: Layout, handles: Sequence[TensorHandle], device_uuids: Sequence[str]
) -> dict[str, Any]:
    """The body of one /update_weights. Raises IpcNotPossible: a handle is not what the layout says."""
    import cloudpickle
    import torch

    tensors = [layout.tensors[h.tensor] for h in handles]
    pickled = cloudpickle.dumps(
        [_by_device(engine_id, t, h, device_uuids, torch) for t, h in zip(tensors, handles, strict=True)]
    )
    return {
        "names": [t.name for t in tensors],
        "dtype_names": [_torch_name(t) for t in tensors],
        "shapes": [list(t.shape) for t in tensors],
        "ipc_handles_pickled": base64.b64encode(pickled).decode(),
    }


def _torch_name(tensor: TensorSpec) -> str:
    return str(DTYPES[tensor.dtype.value[0]]).removeprefix("torch.")


def _by_device(
    engine_id: str, tensor: TensorSpec, handle: TensorHandle, device_uuids: Sequence[str], torch: Any
) -> Mapping[str, tuple[Any, ...]]:
    """Keyed by device UUID as torch writes it in a worker: without its prefix."""
    found = {device_uuid(r.device_uuid): r for r in handle.ranges}
    missing = [uuid for uuid in device_uuids if uuid not in found]
    if missing:
        raise IpcNotPossible(engine_id=engine_id, device_uuid=missing[0], cause=f"no handle of {tensor.name} is for it")
    return {
        uuid.removeprefix("GPU-"): _arguments(engine_id, tensor, found[device_uuid(uuid)], torch)
        for uuid in device_uuids
    }


def _arguments(engine_id: str, tensor: TensorSpec, handle: layout_pb2.BufferHandle, torch: Any) -> tuple[Any, ...]:
    """Of torch's rebuild_cuda_tensor, which the worker calls with its own number of the device in place of the 0."""
    r, dtype = handle.cuda_ipc, DTYPES[tensor.dtype.value[0]]

    def refuse(cause: str) -> IpcNotPossible:
        return IpcNotPossible(engine_id=engine_id, device_uuid=handle.device_uuid, cause=cause)

    if r.torch_version.partition("+")[0] != torch.__version__.partition("+")[0]:
        raise refuse(f"the handle is of torch {r.torch_version}, this agent has {torch.__version__}")
    if r.byte_count != tensor.byte_count:
        raise refuse(f"{tensor.name} has {tensor.byte_count} bytes, its handle {r.byte_count}")
    if r.offset + r.byte_count > r.buffer_bytes or r.offset % dtype.itemsize:
        raise refuse(f"{r.byte_count} bytes at {r.offset} of {r.buffer_bytes} are no {dtype} of {tensor.name}")
    return (
        torch.Tensor,
        tuple(tensor.shape),
        _strides(tensor.shape),
        r.offset // dtype.itemsize,
        torch.UntypedStorage,
        dtype,
        0,
        r.memory_handle,
        r.buffer_bytes,
        r.buffer_offset,
        False,
        r.ref_counter_handle,
        r.ref_counter_offset,
        r.event_handle,
        r.event_sync_required,
    )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of contiguous elements."""
    return tuple(math.prod(max(1, n) for n in shape[i + 1 :]) for i in range(len(shape)))

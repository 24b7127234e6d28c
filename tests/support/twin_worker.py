"""An engine's worker as a real process, for in-memory engines whose bytes come by device memory's twin.

What it does with exports and chunks is what a vLLM worker does: the same classes. What it does with whole tensors is
the in-memory engine's: it sums them.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from controlplane.core.errors import EngineDied, InstallFailed, IpcNotPossible, WeightplaneError
from controlplane.core.layout import Layout
from controlplane.device_memory.port import DeviceMemory
from controlplane.device_memory.ranges import ExportedProbe, ExportedRange
from engine_agent.engine import CUDA_IPC, DeviceChunk, StagedPart
from engine_agent.memory.engine import MemoryEngine
from engine_agent.vllm.cuda_ipc import ArrivingTensors, OpenedExports
from tests.support.twin_devices import TwinMemory

ANSWER_SECONDS = 60.0
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.support.twin_worker"])


def make_ready() -> None:
    """The first worker waits for torch to be imported, which takes seconds; from here on none does."""
    process = _processes.Process(target=int)
    process.start()
    process.join()


class Worker:
    """The process's side: one method an order."""

    def __init__(self, memory: DeviceMemory, slow_seconds: float) -> None:
        self._exports = OpenedExports(memory, "worker")
        self._arriving = ArrivingTensors((), ())
        self._slow_seconds = slow_seconds

    def open(self, probe: Mapping[str, Any] | None) -> None:
        if probe is None:
            self._exports.close()
        else:
            self._exports.open(ExportedProbe.heard(probe))

    def begin(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        self._arriving = ArrivingTensors(names, sizes)

    def take(self, told: Mapping[str, Any], places: Sequence[Any], checksums: Mapping[int, bytes]) -> dict[int, bytes]:
        time.sleep(self._slow_seconds)
        found = self._arriving.take(self._exports, ExportedRange.heard(told), places, checksums)
        return {tensor: hashlib.sha256(data.cpu().numpy().data).digest() for tensor, data in found}


def serve(connection: Connection, memory: Callable[[], DeviceMemory], slow_seconds: float) -> None:
    """Orders in, answers out, until the other side is gone."""
    worker = Worker(memory(), slow_seconds)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("", getattr(worker, method)(*arguments)))
        except WeightplaneError as error:
            connection.send((error.cause if isinstance(error, IpcNotPossible) else str(error), None))


class TwinEngine(MemoryEngine):
    """An in-memory engine with one worker for each device."""

    memory: Callable[[], DeviceMemory] = TwinMemory
    """What its workers open by."""
    slow_seconds = 0.0
    """How long they wait before they read a chunk."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._workers: dict[str, tuple[Any, Connection]] = {}

    def _capabilities(self) -> frozenset[str]:
        return super()._capabilities() | {CUDA_IPC}

    async def open_exports(self, probes: Sequence[ExportedProbe]) -> None:
        by_device = {p.range.device_uuid: p for p in probes}
        for uuid in (await self.start()).device_uuids:
            probe = by_device.get(uuid)
            if probes and probe is None:
                raise IpcNotPossible(self._engine_id, uuid, "no rank exported any for it")
            cause, _ = await self._tell(uuid, "open", None if probe is None else probe.told())
            if cause:
                raise IpcNotPossible(self._engine_id, uuid, cause)

    async def begin_streaming(self, layout: Layout, label: str) -> None:
        await super().begin_streaming(layout, label)
        for uuid in self._workers:
            await self._tell(uuid, "begin", [t.name for t in layout.tensors], [t.byte_count for t in layout.tensors])

    async def install_part(self, part: StagedPart) -> None:
        if part.device is None:
            await super().install_part(part)
            return
        streaming = self._under_way()
        self._weights = hashlib.sha256(b"mixture").digest()
        for uuid, r in part.device.ranges.items():
            cause, found = await self._tell(uuid, "take", r.told(), _places(part.device), dict(part.device.checksums))
            if cause:
                raise InstallFailed(self._engine_id, streaming.label, True, cause)
            streaming.fresh |= {streaming.layout.tensors[tensor].name: digest for tensor, digest in found.items()}

    async def shutdown(self) -> None:
        await super().shutdown()
        for process, connection in self._workers.values():
            connection.close()
            process.kill()
            await asyncio.to_thread(process.join)
        self._workers.clear()

    def worker_pid(self, uuid: str) -> int:
        return int(self._workers[uuid][0].pid)

    async def _tell(self, uuid: str, method: str, *arguments: Any) -> tuple[str, Any]:
        if uuid not in self._workers:
            await asyncio.to_thread(self._start_worker, uuid)
        _, connection = self._workers[uuid]
        try:
            connection.send((method, arguments))
            answer = await asyncio.to_thread(connection.recv)
        except (EOFError, OSError) as error:
            self._death = "a worker died"
            raise EngineDied(self._engine_id, self._death) from error
        cause, found = answer
        return str(cause), found

    def _start_worker(self, uuid: str) -> None:
        ours, theirs = _processes.Pipe()
        process = _processes.Process(target=serve, args=(theirs, type(self).memory, self.slow_seconds), daemon=True)
        process.start()
        theirs.close()
        self._workers[uuid] = process, ours


def _places(chunk: DeviceChunk) -> list[tuple[int, int, int, int]]:
    return [(r.tensor, r.tensor_offset, r.buffer_offset, r.byte_count) for r in chunk.records]

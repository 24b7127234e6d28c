"""Device memory without a device: what is refused, when a ring is used again, and what is never opened again.

Exports come from another process, as they must: the twin refuses what CUDA refuses.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from controlplane.core.errors import ChecksumMismatch, IpcNotPossible
from controlplane.device_memory.cuda import CudaMemory
from controlplane.device_memory.port import DeviceMemoryError
from controlplane.device_memory.ranges import ExportedProbe, ExportedRange
from controlplane.rpc.device_codec import range_from_proto
from engine_agent.life.exports import EngineExports
from engine_agent.memory.engine import MemoryEngine, MemorySettings
from engine_agent.vllm.cuda_ipc import ArrivingTensors, OpenedExports
from tests.support.twin_devices import TwinMemory, own_exports, path_of
from trainer_agent.parts import Part
from trainer_agent.rank.cuda_ipc import MAX_ASIDE, DeviceRing, DeviceRings
from trainer_agent.rank.exporter import ExportedChunk
from trainer_agent.rank.senders.cuda_ipc import CudaIpcSender
from trainer_agent.transports import CUDA_IPC
from weightplane.local.v1 import rank_pb2

UUID = "GPU-6f1e9f3a-0000-0000-0000-000000000001"
ROOM = 4096
CHUNK = bytes(i * i % 251 for i in range(2048))
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.support.twin_devices", "trainer_agent.rank.cuda_ipc"])


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert own_exports() == []


def export(connection: Connection) -> None:
    """A rank: a ring with chunk 1 in it, until it is told to go."""
    ring = DeviceRing(TwinMemory(), ROOM, UUID)
    written = ring.write(1, torch.frombuffer(bytearray(CHUNK), dtype=torch.uint8))
    connection.send((ring.probe.told(), written.told()))
    connection.recv()
    ring.free()
    connection.send("gone")


@pytest.fixture
def rank() -> Iterator[tuple[ExportedProbe, ExportedRange, Connection]]:
    ours, theirs = processes.Pipe()
    process = processes.Process(target=export, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(60)
    probe, written = ours.recv()
    yield ExportedProbe.heard(probe), ExportedRange.heard(written), ours
    ours.send("go")
    process.join(60)


Rank = tuple[ExportedProbe, ExportedRange, Connection]


# ---- the worker ----


def test_what_another_process_exported_is_opened_once_and_read_byte_for_byte(rank: Rank) -> None:
    probe, written, _ = rank
    exports = OpenedExports(TwinMemory(), "e0")
    for _ in range(2):  # the twin, as CUDA, refuses a second opening
        exports.open(probe)
        assert bytes(exports.view(written).numpy()) == CHUNK
    exports.close()


@pytest.mark.parametrize(
    ("memory", "changed", "cause"),
    [
        (TwinMemory("elsewhere"), {}, "invalid resource handle"),
        (TwinMemory(), {"device_uuid": "GPU-other"}, "invalid device ordinal"),
        (TwinMemory(), {"torch_version": "1.0"}, rf"of torch 1\.0, this worker has {torch.__version__.split('+')[0]}"),
        (TwinMemory(), {"offset": ROOM * 1000}, "are not in"),
    ],
    ids=["another host", "another device", "another torch", "outside"],
)
def test_a_worker_that_cannot_open_an_export_says_why(
    rank: Rank, memory: TwinMemory, changed: dict[str, Any], cause: str
) -> None:
    probe, written, _ = rank
    exports = OpenedExports(memory, "e0")
    with pytest.raises(IpcNotPossible, match=cause):
        exports.open(replace(probe, range=replace(probe.range, **changed)))
    with pytest.raises(IpcNotPossible, match="is not open"):
        exports.view(written)


def test_a_probe_with_other_bytes_leaves_nothing_open(rank: Rank) -> None:
    probe, written, _ = rank
    exports = OpenedExports(TwinMemory(), "e0")
    with pytest.raises(IpcNotPossible, match="the probe has other bytes"):
        exports.open(replace(probe, checksum=b"\0" * 8))
    with pytest.raises(IpcNotPossible, match="is not open"):
        exports.view(written)
    exports.open(probe)  # it was closed, else this would be refused
    exports.close()


def test_a_process_cannot_open_what_it_exported_itself() -> None:
    ring = DeviceRing(TwinMemory(), ROOM, UUID)
    with pytest.raises(IpcNotPossible, match="invalid device context"):
        OpenedExports(TwinMemory(), "e0").open(ring.probe)
    ring.free()


def test_a_tensor_over_two_chunks_is_whole_with_its_last_byte_and_compared(rank: Rank) -> None:
    probe, written, _ = rank
    exports, half = OpenedExports(TwinMemory(), "e0"), len(CHUNK) // 2
    exports.open(probe)
    arriving = ArrivingTensors(["a"], [len(CHUNK)])
    assert list(arriving.take(exports, written, [(0, 0, 0, half)], {})) == []
    right = {0: xxhash.xxh3_64_digest(CHUNK)}
    ((tensor, data),) = arriving.take(exports, written, [(0, half, half, half)], right)
    assert (tensor, bytes(data.numpy())) == (0, CHUNK)
    with pytest.raises(ChecksumMismatch, match="a: the bytes received"):
        list(arriving.take(exports, written, [(0, 0, half, half), (0, half, 0, half)], right))
    exports.close()


# ---- the rank ----


def test_inv12_a_ring_that_may_still_be_read_is_set_aside_and_never_written_again() -> None:
    rings = DeviceRings(TwinMemory())
    first = rings.acquire(ROOM, "e0")
    assert rings.acquire(ROOM, "e1") is first, "one for all engines of a push"
    rings.settle(free=True)
    assert rings.acquire(ROOM // 2, "e0") is first
    rings.settle(free=False)
    second = rings.acquire(ROOM, "e0")
    assert second.probe.range.export_id != first.probe.range.export_id
    rings.close()


def test_when_too_many_rings_are_in_doubt_the_rank_says_that_another_way_is_to_be_taken() -> None:
    rings = DeviceRings(TwinMemory())
    for _ in range(MAX_ASIDE + 1):
        rings.acquire(ROOM, "e0")
        rings.settle(free=False)
    with pytest.raises(IpcNotPossible, match=rf"{MAX_ASIDE + 1} exports of this rank may still be open"):
        rings.acquire(ROOM, "e0")
    rings.close()


def test_a_larger_chunk_gets_a_larger_ring() -> None:
    rings = DeviceRings(TwinMemory())
    small = rings.acquire(ROOM, "e0")
    rings.settle(free=True)
    assert rings.acquire(2 * ROOM, "e0") is not small
    rings.close()


class Reader:
    """An inbox whose agent releases a chunk as late as it may, and looks at its half then."""

    def __init__(self) -> None:
        self.announced: list[rank_pb2.SendChunk] = []
        self.read: list[bytes] = []

    def wait_released(self, index: int) -> None:
        r = range_from_proto(self.announced[index].buffers[0])
        self.read.append(path_of(r.handle).read_bytes()[r.offset : r.offset + r.byte_count])

    def chunk(self, chunk: ExportedChunk) -> rank_pb2.SendChunk:
        return rank_pb2.SendChunk(index=chunk.index)

    def say(self, request: rank_pb2.RankRequest) -> None:
        if request.HasField("send_chunk"):
            self.announced.append(request.send_chunk)


def test_inv12_a_half_is_written_again_only_after_the_chunk_before_the_last_was_let_go() -> None:
    reader, rings, segment = Reader(), DeviceRings(TwinMemory()), bytearray(ROOM)
    part = Part(ranks=(0,), transport=CUDA_IPC, engines=(("e0", "i"),))
    means: Any = SimpleNamespace(
        part=part,
        rank=0,
        announcer=reader,
        segment=SimpleNamespace(memory=memoryview(segment)),
        inbox=reader,
        rings=rings,
        room_bytes=ROOM,
    )
    sender = CudaIpcSender(means)
    chunks = [bytes([i]) * (100 + i) for i in range(5)]
    for index, data in enumerate(chunks):  # the memory that they are exported to is one, and free at once
        segment[: len(data)] = data
        sender.send(ExportedChunk(index, 0, len(data), ()))
    assert reader.read == chunks[:3]
    rings.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a host without a GPU says")
def test_a_host_without_a_gpu_says_that_it_has_none() -> None:
    cuda = CudaMemory()
    assert "without CUDA" in cuda.why_not() or "no CUDA device" in cuda.why_not()
    for refused in (lambda: cuda.export(ROOM, UUID), lambda: cuda.open(b"h" * 64, ROOM, UUID)):
        with pytest.raises(DeviceMemoryError, match="CUDA"):
            refused()
    with pytest.raises(IpcNotPossible, match="CUDA"):
        DeviceRings().acquire(ROOM, "e0")


# ---- the agent ----


class Engine(MemoryEngine):
    """Notes what is to be open."""

    def __init__(self) -> None:
        super().__init__(MemorySettings(tensors={"a": (1,)}), "e0")
        self.asked: list[list[str]] = []
        self.error: Exception | None = None

    async def open_exports(self, probes: Any) -> None:
        self.asked.append([p.range.export_id for p in probes])
        if self.error is not None:
            raise self.error


def probe_of(export_id: str) -> ExportedProbe:
    return ExportedProbe(ExportedRange(UUID, export_id, b"h" * 64, ROOM, 0, ROOM, str(torch.__version__)), b"c" * 8)


async def test_what_was_closed_is_never_opened_again() -> None:
    engine = Engine()
    exports = EngineExports(engine, "e0")
    for name in ("a", "a", "b"):
        await exports.take([probe_of(name)], term=1)
    assert engine.asked == [["a"], ["b"]]
    with pytest.raises(IpcNotPossible, match="closed before"):
        await exports.take([probe_of("a")], term=1)
    assert engine.asked == [["a"], ["b"]]


async def test_what_could_not_be_opened_is_not_asked_for_again() -> None:
    engine = Engine()
    exports = EngineExports(engine, "e0")
    engine.error = IpcNotPossible(engine_id="e0", device_uuid=UUID, cause="no")
    with pytest.raises(IpcNotPossible, match=": no"):
        await exports.take([probe_of("a")], term=1)
    engine.error = None
    with pytest.raises(IpcNotPossible, match="closed before"):
        await exports.take([probe_of("a")], term=1)


async def test_g7_a_later_term_finds_an_earlier_writers_exports_to_close() -> None:
    engine = Engine()
    exports = EngineExports(engine, "e0")
    assert not exports.heard(9)
    await exports.take([probe_of("a")], term=2)
    assert (exports.heard(2), exports.heard(3)) == (False, True)
    await exports.close()
    assert (engine.asked, exports.any_open) == ([["a"], []], False)

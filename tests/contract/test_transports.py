"""The contract of the transports: every way from a rank to an engine agent keeps it (`both_sides.py` has the ways)."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from controlplane.core.errors import LinkFailed, UpdateFailed
from controlplane.rpc.metrics import SENT_BYTES
from engine_agent.daemon import building
from engine_agent.receivers.broadcast import BroadcastReceiver
from engine_agent.receivers.inline import InlineReceiver
from engine_agent.receivers.shared_memory import SharedMemoryReceiver
from tests.contract.both_sides import CHECKPOINT, WAYS, Way, both_sides
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN
from tests.support.toy_rank import tensors_of
from tests.support.toy_trainer import SMALL_CHUNK_BYTES
from tests.support.twin_devices import TwinMemory, own_exports
from tests.support.twin_worker import TwinEngine
from trainer_agent.agent import pusher
from trainer_agent.agent.chunk_log import ChunkLog
from trainer_agent.chunking import FIRST_BYTES
from trainer_agent.rank import cuda_ipc
from trainer_agent.rank.exporter import ExportedChunk, Exporter
from weightplane.local.v1 import rank_pb2

pytestmark = pytest.mark.timeout(240)
LARGE_CHUNK_BYTES = 16 << 20
"""More than sockets hold: what nobody receives has not arrived."""
HELD_CHUNK = 3
"""The first that has so many."""
OVERLAP_SECONDS = 7.0
"""A reader that the next chunk's gather did not let go by then goes on, and the test fails. Less than what an engine
waits for bytes: an attempt that ended by that would end the gather, too."""

HOST_RINGS = [w for w in WAYS if w.name in ("inline_ring", "broadcast_shared", "broadcast_per_engine")]
RINGS = [*HOST_RINGS, *(w for w in WAYS if w.devices)]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda w: w.name)
every_transport = pytest.mark.parametrize("way", [*WAYS, CHECKPOINT], ids=lambda w: w.name)
"""What holds with no sender, too. Where one is stopped, slow, or spoils its bytes, a checkpoint has none: its files are
tests/unit/test_checkpoint_reading.py's."""
every_ring = pytest.mark.parametrize("way", RINGS, ids=lambda w: w.name)


@pytest.fixture(autouse=True)
def device_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where a way has devices, this is theirs. What was exported is gone afterwards."""
    monkeypatch.setattr(cuda_ipc, "devices", TwinMemory())
    monkeypatch.setattr(building, "MemoryEngine", TwinEngine)
    yield
    assert own_exports() == []


def nothing(step: int) -> dict[str, torch.Tensor]:
    return {"none": torch.zeros(0, 8), "no rows": torch.zeros(3, 0)}


def strided(step: int) -> dict[str, torch.Tensor]:
    """Larger than a chunk, and cut in the middle of rows."""
    grid = torch.arange(300 * 700, dtype=torch.float32).reshape(300, 700) + step
    return {"transposed": grid.t(), "every other": grid[::2, 1::2], "flat": grid[0]}


def one_a_chunk(step: int) -> dict[str, torch.Tensor]:
    """Each fills a chunk: they begin small and double, and from `HELD_CHUNK` on have `LARGE_CHUNK_BYTES`."""
    sizes = [FIRST_BYTES, FIRST_BYTES, 2 * FIRST_BYTES, *[LARGE_CHUNK_BYTES] * 3]
    return {f"t{i}": torch.full((size // 4,), float(step + i)) for i, size in enumerate(sizes)}


def nothing_staged(own_segments: int) -> bool:
    """No receiver of this process holds memory, nor a rank's segment; a rank that lives may have its own open."""
    targets = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    staged = [t for t in targets if "weightplane-staging" in t]
    segments = [t for t in targets if f"weightplane-{RUN}-" in t]
    assert (staged, segments[own_segments:]) == ([], [])
    return True


def segment_bytes() -> int:
    """Size of the rank's segments."""
    return sum(p.stat().st_size for p in Path("/dev/shm").glob(f"weightplane-{RUN}-*"))


@every_transport
async def test_three_updates_in_a_row_arrive_bit_for_bit_split_tensors_and_odd_shapes_too(
    tmp_path: Path, way: Way
) -> None:
    async with both_sides(tmp_path, way) as both:
        for step in (1, 2, 3):
            assert await both.bring(step) == {"e0": "APPLIED", "e1": "APPLIED"}
            assert [await both.holds(e, tensors_of(step)) for e in ("e0", "e1")] == [True, True]


@every_way
async def test_the_bytes_go_by_this_way_and_by_no_other(tmp_path: Path, way: Way) -> None:
    async with both_sides(tmp_path, way) as both:
        before = sent_bytes()
        await both.rank.push(1)
        grown = {name for name, count in sent_bytes().items() if count > before.get(name, 0.0)}
        assert grown == {way.coordinator["transport"]}


@every_transport
async def test_g8_an_empty_chunk_is_legal(tmp_path: Path, way: Way) -> None:
    async with both_sides(tmp_path, way, tensors=nothing) as both:
        for step in (1, 2):
            assert await both.bring(step) == {"e0": "APPLIED", "e1": "APPLIED"}


@every_transport
async def test_tensors_that_are_no_runs_of_memory_arrive_as_their_logical_values(tmp_path: Path, way: Way) -> None:
    async with both_sides(tmp_path, way, engines=1, tensors=strided) as both:
        await both.bring(1)
        assert await both.holds("e0", strided(1))


@every_way
async def test_an_update_given_up_in_the_middle_frees_both_sides_and_the_next_one_arrives(
    tmp_path: Path, way: Way
) -> None:
    async with both_sides(tmp_path, way) as both:
        await both.push(1)
        both.rank.source.before = raising_at("head")
        with pytest.raises(ValueError, match="the source broke"):
            await both.push(2)
        await eventually(lambda: nothing_staged(own_segments=1))
        assert [await both.took_nothing(e, 1) for e in ("e0", "e1")] == [True, True]
        both.rank.source.before = lambda name: None
        await both.push(3)
        assert [await both.holds(e, tensors_of(3)) for e in ("e0", "e1")] == [True, True]


@every_way
async def test_a_sender_that_dies_in_the_middle_leaves_engines_free_and_with_what_they_had(
    tmp_path: Path, way: Way
) -> None:
    async with both_sides(tmp_path, way) as both:
        await both.push(1)

        def die(name: str) -> None:
            if name == "head":
                both.rank.die()
                raise Dead

        both.rank.source.before = die
        with pytest.raises((Dead, ValueError)):  # what is left of it finds its socket closed
            await both.push(2)
        await eventually(lambda: nothing_staged(own_segments=0))
        assert [await both.took_nothing(e, 1) for e in ("e0", "e1")] == [True, True]


@every_way
async def test_an_engine_that_goes_in_the_middle_does_not_keep_the_others_from_the_version(
    tmp_path: Path, way: Way
) -> None:
    async with both_sides(tmp_path, way) as both:
        await both.push(1)
        loop, gone = asyncio.get_running_loop(), threading.Event()

        async def stop() -> None:
            await both.fleet.stop("e1")
            gone.set()

        def wait_for_the_end_of_e1(name: str) -> None:
            if name == "layer.1" and not gone.is_set():
                asyncio.run_coroutine_threadsafe(stop(), loop)
                assert gone.wait(60)

        both.rank.source.before = wait_for_the_end_of_e1
        report = await both.push(2)
        assert report.outcomes["e0"] == "APPLIED"
        assert await both.holds("e0", tensors_of(2))


@every_way
async def test_inv12_a_slow_reader_gets_every_byte_as_it_was_exported(
    tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of the sender's memory come late to each chunk, while the rank exports as fast as it may: every byte's
    checksum was made at the export and is compared after the reading (G6)."""
    slow_readers(monkeypatch)
    async with both_sides(tmp_path, way, push_timeout=100.0) as both:
        for step in (1, 2):
            report = await both.push(step)
            assert report.version.number == step, "no attempt failed"
            assert [await both.holds(e, tensors_of(step)) for e in ("e0", "e1")] == [True, True]


@pytest.mark.parametrize("way", HOST_RINGS, ids=lambda w: w.name)
async def test_the_next_chunk_is_gathered_while_the_one_before_is_on_its_way(
    tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads a large chunk before the rank asked its source for what is in the next. A sender that waits for a
    chunk's arrival before it gathers on would stand still."""
    gathered = threading.Event()
    stood_still = readers_wait_for(gathered, monkeypatch)
    async with both_sides(tmp_path, way, engines=1, tensors=one_a_chunk, chunk_bytes=LARGE_CHUNK_BYTES) as both:
        both.rank.source.before = lambda name: gathered.set() if name == f"t{HELD_CHUNK + 1}" else None
        report = await both.push(1)
        assert (report.version.number, stood_still) == (1, []), "no attempt failed, and no reader waited in vain"
        assert await both.holds("e0", one_a_chunk(1))


@every_way
async def test_bytes_that_changed_on_the_way_are_refused_and_the_old_version_stays(
    tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with both_sides(tmp_path, way) as both:
        await both.push(1)
        with monkeypatch.context() as patch:
            patch.setattr(pusher, "RETRY_SECONDS_LEFT", math.inf)
            spoil_exports(patch)
            with capture_logs() as logs, pytest.raises((UpdateFailed, LinkFailed)):
                await both.push(2)
        refusals = [f"{line['reason']}: {line['text']}" for line in logs if line["event"] == "call_refused"]
        assert any("checksum" in refusal.lower() for refusal in refusals), refusals
        assert [await both.took_nothing(e, 1) for e in ("e0", "e1")] == [True, True]
        await both.push(3)
        assert [await both.holds(e, tensors_of(3)) for e in ("e0", "e1")] == [True, True]


@every_ring
async def test_m5_a_sender_that_only_copies_keeps_two_chunks_and_not_the_weights(tmp_path: Path, way: Way) -> None:
    async with both_sides(tmp_path, way, engines=1) as both:
        await both.push(1)
        total = sum(t.nbytes for t in tensors_of(1).values())
        assert segment_bytes() == 2 * SMALL_CHUNK_BYTES < total


def sent_bytes() -> dict[str, float]:
    """By transport, as this process's trainer agents count them."""
    (counter,) = SENT_BYTES.collect()
    return {s.labels["transport"]: s.value for s in counter.samples if s.name.endswith("_total")}


# ---- what is done to them ----


class Dead(BaseException):
    """Passes everything in the rank: a dead process handles nothing."""


def raising_at(tensor: str) -> Callable[[str], None]:
    def before(name: str) -> None:
        if name == tensor:
            raise ValueError("the source broke")

    return before


def slow_readers(patch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """Whoever reads the sender's memory waits before each chunk: the agent, an engine, a link."""
    chunk = ChunkLog.chunk

    async def late(self: ChunkLog, index: int) -> rank_pb2.SendChunk | None:
        found = await chunk(self, index)
        await asyncio.sleep(seconds)
        return found

    patch.setattr(ChunkLog, "chunk", late)
    for receiver in (SharedMemoryReceiver, InlineReceiver, BroadcastReceiver):
        patch.setattr(receiver, "place", slow(receiver.place, seconds))
    patch.setattr(TwinEngine, "slow_seconds", seconds)


def readers_wait_for(gathered: threading.Event, patch: pytest.MonkeyPatch) -> list[int]:
    """Whoever reads a large chunk of the sender waits for `gathered`. Gives the chunks whose readers waited in vain."""
    chunk = ChunkLog.chunk
    in_vain: list[int] = []

    async def late(self: ChunkLog, index: int) -> rank_pb2.SendChunk | None:
        found = await chunk(self, index)
        if index >= HELD_CHUNK and not await asyncio.to_thread(gathered.wait, OVERLAP_SECONDS):
            in_vain.append(index)
        return found

    patch.setattr(ChunkLog, "chunk", late)
    return in_vain


def slow(place: Callable[..., None], seconds: float) -> Callable[..., None]:
    def late(*arguments: Any) -> None:
        time.sleep(seconds)
        place(*arguments)

    return late


def spoil_exports(patch: pytest.MonkeyPatch) -> None:
    """One byte of the second chunk changes after its checksum was made."""
    chunk = Exporter._chunk

    def spoiled(self: Exporter, number: int, *more: Any) -> ExportedChunk:
        made = chunk(self, number, *more)
        if number == 1:
            self._memory.memory[made.start] ^= 1
        return made

    patch.setattr(Exporter, "_chunk", spoiled)

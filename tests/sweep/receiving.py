"""The other side of a sweep's pushes: for each transport a coordinator, engine agents and a trainer agent (real gRPC).

    python -m tests.sweep.receiving --directory DIR --ranks 4

For each topology in turn engines are started that expect its model: one for each size that a slot of these ranks can
have. The engines have no model; what they are given is compared with the checkpoint, bit for bit, for every device.
Each says so in a file of its own, which rank 0 reads (see `pushes`).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.core.layout import DType
from controlplane.core.plan import Transport
from controlplane.processes import set_death_signal
from controlplane.tensor_files import StoredTensor, read_file
from engine_agent.daemon import agent, building
from engine_agent.daemon.settings import EngineSettings
from engine_agent.engine import InstallReport, SegmentSpan, StagedWeights
from engine_agent.memory.engine import MemoryEngine, MemorySettings
from engine_agent.vllm.checkpoint import HEAD_NAME
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.tiny_rank import EMBEDDING_NAME
from tests.sweep.pushes import OFFERS, RECEIVED, write_json
from tests.sweep.topology import Topology
from trainer_agent.agent.daemon import TrainerAgent
from trainer_agent.agent.settings import MIN_CHUNK_BYTES, TrainerSettings

TRANSPORTS = (Transport.SHARED_MEMORY, Transport.INLINE, Transport.BROADCAST)
COLOCATED = frozenset({Transport.SHARED_MEMORY})
"""Whose engines are on the ranks' own devices; the others' have devices of their own."""
FIRST_OTHER_DEVICE = 1000
CASE_SECONDS = 120.0
LEASE_SECONDS = 60.0
"""Ranks of a sweep share few cores, and no lease is to end here by slowness."""


def slots(ranks: int) -> dict[int, tuple[int, ...]]:
    """By size: the ranks of a slot. The middle ones, which no tensor-parallel group has together."""
    sizes = [1 << i for i in range(ranks.bit_length())]
    return {size: tuple(range((ranks - size) // 2, (ranks + size) // 2)) for size in sizes}


class ComparingEngine(MemoryEngine):
    """An in-memory engine that says what it was given, instead of what it would make of it."""

    def __init__(self, settings: MemorySettings, engine_id: str, case: Case) -> None:
        super().__init__(settings, engine_id)
        self._case = case
        self._pushes: list[dict[str, Any]] = []

    async def install(self, staged: StagedWeights) -> InstallReport:
        """Every second push brings the checkpoint with all signs turned."""
        digests = self._case.turned if len(self._pushes) % 2 else self._case.checkpoint
        self._pushes.append(await asyncio.to_thread(compare, staged, digests, self._case.memory.tensors))
        write_json(self._case.received / f"{self._engine_id}.json", self._pushes)
        return await super().install(staged)


def compare(staged: StagedWeights, digests: Mapping[str, bytes], expected: Iterable[str]) -> dict[str, Any]:
    """What differs from the tensors of these sha256, for which device, and which names no tensor or tie stands for."""
    wrong = []
    for device, chunks in staged.chunks.items():
        for tensor, place in zip(staged.layout.tensors, staged.placements, strict=True):
            got = _read(chunks[place.chunk], place.offset, tensor.byte_count)
            if hashlib.sha256(got).digest() != digests.get(tensor.name):
                wrong.append(f"{tensor.name} for {device or 'any device'}")
    covered = {t.name for t in staged.layout.tensors} | {tie.alias for tie in staged.layout.ties}
    return {
        "wrong": wrong,
        "missing": sorted(set(expected) - covered),
        "tensors": len(staged.placements),
        "devices": len(staged.chunks),
        "number": int(staged.label),
    }


def _read(span: SegmentSpan, offset: int, size: int) -> bytes:
    with open(span.path, "rb") as file:
        file.seek(span.offset + offset)
        return file.read(size)


def engines_compare_with(case: Case) -> None:
    """Whatever in-memory engine an agent of this process starts from now on."""

    def make(settings: MemorySettings, engine_id: str, **how: bool) -> ComparingEngine:
        return ComparingEngine(settings, engine_id, case)

    vars(building)["MemoryEngine"] = make


@dataclass(frozen=True)
class Case:
    """One topology's checkpoint, and where its engines say what they got."""

    topology: Topology
    directory: Path
    stored: Mapping[str, StoredTensor]
    checkpoint: Mapping[str, bytes]
    """sha256 of each tensor's bytes."""
    turned: Mapping[str, bytes]
    """The same, with the sign of every element turned."""

    @classmethod
    def of(cls, topology: Topology, directory: Path) -> Case:
        file = directory / "models" / topology.model / "model.safetensors"
        stored, data = dict(read_file(file)), file.read_bytes()
        tensors = {n: data[s.offset : s.offset + s.byte_count] for n, s in stored.items()}
        turned = {n: turn_signs(t, stored[n].dtype.item_bytes) for n, t in tensors.items()}
        return cls(topology, directory, stored, _digests(tensors), _digests(turned))

    @property
    def received(self) -> Path:
        return self.directory / RECEIVED / self.topology.name

    @property
    def memory(self) -> MemorySettings:
        """An engine that expects the checkpoint's tensors, and a tied head by its own name too, as vLLM's do."""
        shapes = {name: s.shape for name, s in self.stored.items()}
        tied = {HEAD_NAME: shapes[EMBEDDING_NAME]} if self.topology.tied else {}
        dtype = {"float32": DType.F32, "bfloat16": DType.BF16}[self.topology.dtype]
        return MemorySettings(tensors=shapes | tied, dtype=dtype)


def turn_signs(data: bytes, item_bytes: int) -> bytes:
    """Of little-endian floating-point numbers: the topmost bit of each."""
    turned = bytearray(data)
    last = slice(item_bytes - 1, None, item_bytes)
    turned[last] = bytes(byte ^ 0x80 for byte in turned[last])
    return bytes(turned)


def _digests(tensors: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: hashlib.sha256(data).digest() for name, data in tensors.items()}


class Fleet:
    """One transport's coordinator, and the agents of one case after the other."""

    def __init__(self, transport: Transport, directory: Path) -> None:
        self.transport = transport
        self._directory = directory
        self._fleet = LocalFleet(directory)

    async def start(self) -> None:
        self._directory.mkdir()
        await self._fleet.start_coordinator(transport=self.transport.value, lease_ttl_seconds=LEASE_SECONDS)

    async def close(self) -> None:
        await self._fleet.close()

    async def begin(self, case: Case, stack: AsyncExitStack) -> str:
        """Engines that expect the case's model, and a trainer agent: its socket. They end with the stack."""
        for size, ranks in slots(case.topology.ranks).items():
            engine_id = f"{self.transport.value}-slot{size}"
            self._start_engine(case, engine_id, ranks)
            stack.push_async_callback(self._fleet.stop, engine_id)
        await eventually(self._knows(len(slots(case.topology.ranks))), within=CASE_SECONDS)
        directory = Path(tempfile.mkdtemp(prefix="weightplane-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        settings = TrainerSettings(
            self._fleet.address, RUN, trainer_id="sweep", chunk_bytes=MIN_CHUNK_BYTES, link_host="127.0.0.1"
        )
        trainer = TrainerAgent(settings, directory / "ranks.sock")
        stack.push_async_callback(trainer.close)
        await trainer.start()
        return str(directory / "ranks.sock")

    def _start_engine(self, case: Case, engine_id: str, ranks: Sequence[int]) -> None:
        apart = 0 if self.transport in COLOCATED else FIRST_OTHER_DEVICE * len(ranks)
        settings = EngineSettings(
            engine_id=engine_id,
            coordinator=self._fleet.address,
            run_id=RUN,
            state_dir=self._directory / "engines",
            backend="memory",
            memory=case.memory,
            cpu_devices=tuple(apart + rank for rank in ranks),
        )
        self._fleet._start(engine_id, agent.run_engine, settings)

    def _knows(self, count: int) -> Any:
        async def knows() -> bool:
            views = (await self._fleet.view()).engines
            return sum(v.known and v.status.engine.engine_id in self._fleet.tasks for v in views) == count

        return knows


async def serve(directory: Path, ranks: int) -> None:
    """All topologies, in the order in which the ranks come to them."""
    topologies = [Topology(**fields) for fields in json.loads((directory / "topologies.json").read_text())]
    fleets = [Fleet(t, directory / t.value) for t in TRANSPORTS]
    for fleet in fleets:
        await fleet.start()
    for number, topology in enumerate(topologies):
        answers = [directory / "facts" / f"{number}.rank{rank}.json" for rank in range(ranks)]
        await _serve_case(Case.of(topology, directory), fleets, answers)
    for fleet in fleets:
        await fleet.close()


async def _serve_case(case: Case, fleets: Sequence[Fleet], answers: Sequence[Path]) -> None:
    """Until every rank has written what became of it, whether it ever came or not."""
    case.received.mkdir(parents=True)
    engines_compare_with(case)
    async with AsyncExitStack() as stack:
        offer = {fleet.transport.value: await fleet.begin(case, stack) for fleet in fleets}
        write_json(case.directory / OFFERS / f"{case.topology.name}.json", offer)
        await eventually(lambda: all(file.exists() for file in answers), within=CASE_SECONDS)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--directory", type=Path, required=True)
    arguments.add_argument("--ranks", type=int, required=True)
    given = arguments.parse_args()
    set_death_signal(signal.SIGKILL)
    asyncio.run(serve(given.directory, given.ranks))


if __name__ == "__main__":
    main()

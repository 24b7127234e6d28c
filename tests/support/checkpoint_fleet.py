"""A local fleet whose engines read checkpoints; a person at an engine's Lifecycle; and an engine agent as a process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from controlplane import failpoints
from controlplane.checkpoints import CheckpointManifest, write_checkpoint
from controlplane.core.versions import ModelName, RunId, Term, WeightVersion
from controlplane.rpc.codec import version_to_proto
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.memory.engine import MemorySettings, token_of, weights_of
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.writer import (
    LAYOUT,
    SHAPES,
    Stream,
    Weights,
)
from weightplane.v1 import (
    engine_pb2,
    fleet_pb2,
    lifecycle_pb2,
    lifecycle_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    version_pb2,
    weight_update_pb2,
)

FILE_BYTES = 4000
"""So that each tensor of LAYOUT has a file of its own."""


def checkpoint_root(fleet: LocalFleet) -> Path:
    return fleet.directory / "checkpoints"


def start_engine(fleet: LocalFleet, engine_id: str, memory: Mapping[str, Any] | None = None, **settings: Any) -> None:
    """In this process; it reads checkpoints. `settings` go over the agent's own, `memory` over its engine's."""
    values: dict[str, Any] = {
        "engine_id": engine_id,
        "coordinator": fleet.address,
        "run_id": RUN,
        "state_dir": fleet.directory / "engines",
        "backend": "memory",
        "memory": MemorySettings(**{"tensors": SHAPES, **(memory or {})}),
        "stream_idle_seconds": 10.0,
        "checkpoint_root": checkpoint_root(fleet),
    }
    fleet._start(engine_id, run_engine, EngineSettings(**values | settings))


@asynccontextmanager
async def checkpoint_fleet(
    directory: Path, engines: int = 2, memory: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[LocalFleet]:
    """Coordinator, engines that read checkpoints, and the trainer's lease."""
    fleet = LocalFleet(directory)
    try:
        await fleet.start_coordinator()
        for i in range(engines):
            start_engine(fleet, f"e{i}", memory, **settings)
        await fleet.wait_for_engines(engines)
        await fleet.take_lease()
        yield fleet
    finally:
        await fleet.close()


# ---- checkpoints --------------------------------------------------------------------------------


def write(root: Path, name: str, weights: Weights, version: WeightVersion, **changed: Any) -> CheckpointManifest:
    """A checkpoint of LAYOUT; `changed` goes over what it says of itself."""
    values: dict[str, Any] = {
        "run_id": RunId(RUN),
        "model": ModelName("policy"),
        "version": version,
        "step": None,
        "layout": LAYOUT,
        "content_digest": weights.digest,
        "tensors": zip([t.name for t in LAYOUT.tensors], weights.parts, strict=True),
        "shard_bytes": FILE_BYTES,
    }
    return write_checkpoint(root, name, **values | changed)


async def keep(fleet: LocalFleet, weights: Weights, state: fleet_pb2.UpdateState) -> CheckpointManifest:
    """What a trainer does after a push: write the version, and tell the coordinator."""
    version = WeightVersion(number=state.version.number, term=Term(state.version.term))
    name = f"policy-{version.number}"
    manifest = await asyncio.to_thread(write, checkpoint_root(fleet), name, weights, version)
    await publish(fleet, name, manifest)
    return manifest


async def publish(fleet: LocalFleet, name: str, manifest: CheckpointManifest) -> None:
    checkpoint = fleet_pb2.Checkpoint(
        model=manifest.model,
        version=version_to_proto(manifest.version),
        name=name,
        layout_digest=manifest.layout.digest,
        content_digest=manifest.content_digest,
        tensor_count=len(manifest.layout.tensors),
        file_count=len(manifest.files),
        byte_count=manifest.layout.byte_count,
    )
    request = fleet_pb2.PublishCheckpointRequest(run_id=RUN, term=fleet.term, checkpoint=checkpoint)
    await fleet.fleet.PublishCheckpoint(request, timeout=PATIENCE_SECONDS)


async def roll_back(fleet: LocalFleet, number: int) -> fleet_pb2.UpdateState:
    """Ask for it, and wait for the decision."""
    stub: Any = operator_pb2_grpc.OperatorStub(fleet.channel(fleet.address))
    await fleet.settled()
    request = operator_pb2.RollbackRequest(run_id=RUN, model="policy", number=number, request_id=uuid.uuid4().hex)
    response = await stub.Rollback(request, timeout=PATIENCE_SECONDS)
    assert response.restores.number == number
    return await fleet.decided(response.update_id)


def words_of(weights: Weights, count: int = 4) -> list[int]:
    """What an in-memory engine that holds these weights says, as `LocalFleet.generate` asks."""
    digests = {t.name: hashlib.sha256(p).digest() for t, p in zip(LAYOUT.tensors, weights.parts, strict=True)}
    return [token_of(weights_of(digests), [1, 2, 3], i, 256) for i in range(count)]


async def routable(fleet: LocalFleet, engine_id: str, number: int) -> None:
    """Wait until rollout clients are sent to it for that version."""

    async def check() -> bool:
        views = [v for v in (await fleet.view()).engines if v.status.engine.engine_id == engine_id]
        return [(v.routable, v.status.applied.number) for v in views] == [(True, number)]

    await eventually(check)


async def open_directly(fleet: LocalFleet, engine_id: str, version: WeightVersion, **changed: Any) -> Stream:
    """A stream to an engine by itself, under the trainer's term, beside every plan of the coordinator's."""
    view = await fleet.engine(engine_id)
    values: dict[str, Any] = {
        "run_id": RUN,
        "model": "policy",
        "engine": view.status.engine,
        "update_id": uuid.uuid4().hex,
        "writer_term": fleet.term,
        "version": version_to_proto(version),
        "manifest": weight_update_pb2.Manifest(
            layout_digest=LAYOUT.digest, tensor_count=len(LAYOUT.tensors), byte_count=LAYOUT.byte_count
        ),
        "transport": weight_update_pb2.TRANSPORT_INLINE,
    }
    return Stream(fleet.channel(view.endpoint), weight_update_pb2.UpdateOpen(**values | changed))


# ---- a person at an engine ----------------------------------------------------------------------


class Person:
    """Calls one engine's Lifecycle in one name."""

    def __init__(self, fleet: LocalFleet, engine_id: str, owner: str = "me") -> None:
        self._fleet = fleet
        self._engine_id = engine_id
        self.owner = owner
        self.engine: version_pb2.EngineRef | None = None
        """Another life than its present one, to be named."""

    async def _call(self, method: str, request: Any, **fields: Any) -> engine_pb2.EngineStatus:
        view = await self._fleet.engine(self._engine_id)
        stub = lifecycle_pb2_grpc.LifecycleStub(self._fleet.channel(view.endpoint))
        message = request(run_id=RUN, engine=self.engine or view.status.engine, owner=self.owner, **fields)
        response = await getattr(stub, method)(message, timeout=PATIENCE_SECONDS)
        assert isinstance(response.status, engine_pb2.EngineStatus)
        return response.status

    async def sleep(self, level: int = 1) -> engine_pb2.EngineStatus:
        return await self._call("Sleep", lifecycle_pb2.SleepRequest, level=level)

    async def wake(self, *, kv_cache: bool = True) -> engine_pb2.EngineStatus:
        return await self._call("WakeUp", lifecycle_pb2.WakeUpRequest, kv_cache=kv_cache)

    async def drain(self) -> engine_pb2.EngineStatus:
        return await self._call("Drain", lifecycle_pb2.DrainRequest)

    async def pause(self) -> engine_pb2.EngineStatus:
        return await self._call("PauseGeneration", lifecycle_pb2.PauseGenerationRequest)

    async def resume(self) -> engine_pb2.EngineStatus:
        return await self._call("ResumeGeneration", lifecycle_pb2.ResumeGenerationRequest)


# ---- an engine agent as a process ---------------------------------------------------------------


class EngineProcess:
    """`weightplane engine` with an in-memory engine, and its failpoints' directory."""

    def __init__(self, process: asyncio.subprocess.Process, points: Path) -> None:
        self._process = process
        self.points = points

    @classmethod
    async def start(cls, fleet: LocalFleet, engine_id: str, *sets: str) -> EngineProcess:
        points = fleet.directory / f"{engine_id}-failpoints"
        points.mkdir()
        shapes = ", ".join(f"{name} = {list(shape)}" for name, shape in SHAPES.items())
        settings = [
            f"engine_id={engine_id}",
            f"run_id={RUN}",
            f"state_dir={fleet.directory / 'engines'}",
            f"checkpoint_root={checkpoint_root(fleet)}",
            "backend=memory",
            f"memory.tensors={{ {shapes} }}",
            *sets,
        ]
        words = [word for setting in settings for word in ("--set", setting)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "controlplane.cli.main", "engine", "--listen", "127.0.0.1:0"),
            *("--coordinator", fleet.address, "--die-with-parent", str(os.getpid()), *words),
            env=os.environ | {failpoints.DIRECTORY_VARIABLE: str(points)},
        )
        return cls(process, points)

    async def reached(self, name: str) -> None:
        await eventually((self.points / f"{name}.reached").exists)

    def let_go(self, name: str) -> None:
        (self.points / f"{name}.go").touch()

    async def ended(self) -> int:
        """Its exit code, once it ends by itself. (A signal to one that just died would take its exit code away.)"""
        return await asyncio.wait_for(self._process.wait(), PATIENCE_SECONDS)

    async def stop(self) -> int:
        self._process.terminate()
        return await self.ended()

"""A coordinator and engine agents with in-memory engines, in this process, over real gRPC."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import grpc

from controlplane.coordinator.daemon import CoordinatorSettings, run_coordinator
from controlplane.rpc.channels import open_channel
from controlplane.rpc.security import PLAIN, TlsSettings
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.memory.engine import MemorySettings
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.writer import LAYOUT, SHAPES, Stream, Weights
from weightplane.v1 import (
    engine_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    lifecycle_pb2,
    lifecycle_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    version_pb2,
    weight_update_pb2,
)

RUN = os.environ.setdefault("WEIGHTPLANE_TEST_RUN", f"test-run-{os.getpid()}")
"""Of this run of the tests and of its processes: two runs on one host do not see each other's segments."""
SETTLE_SECONDS = 20.0
"""Longest that is waited for gates that may never open."""


def _could_serve(engine: operator_pb2.EngineView, served: Sequence[version_pb2.WeightVersion]) -> bool:
    status = engine.status
    awake = status.residency == engine_pb2.RESIDENCY_AWAKE and status.life == engine_pb2.ENGINE_LIFE_RUNNING
    return engine.known and awake and not status.holds and status.HasField("applied") and status.applied in served


class LocalFleet:
    """The running parts, and a trainer's lease held by this test."""

    def __init__(self, directory: Path, tls_of: Callable[[str], TlsSettings] = lambda node: PLAIN) -> None:
        """`tls_of`: by `ROLE/NAME`, who each part is; the test itself is `admin/test`."""
        self.directory = directory
        self.tls_of = tls_of
        self.address = ""
        self._coordinator: dict[str, Any] = {}
        self.term = 0
        self.stops: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[int]] = {}
        self.channels: dict[str, grpc.aio.Channel] = {}
        self._trainer: Any = None

    # ---- processes ----

    async def start_coordinator(self, **settings: Any) -> None:
        """As it was started before, but for these."""
        self._coordinator |= settings
        address_file = self.directory / "address"
        address_file.unlink(missing_ok=True)
        values: dict[str, Any] = {
            "listen": self.address or "127.0.0.1:0",
            "state_dir": self.directory / "coordinator",
            "run_id": RUN,
            "heartbeat_seconds": 0.1,
            "lease_ttl_seconds": 2.0,
            "address_file": address_file,
            "tls": self.tls_of("coordinator/*"),
        }
        self._start("coordinator", run_coordinator, CoordinatorSettings(**values | self._coordinator))
        await eventually(address_file.exists)
        self.address = address_file.read_text()

    def start_engine(
        self,
        engine_id: str,
        *,
        apply: Literal["staged", "streaming"] = "staged",
        listen: str = "127.0.0.1:0",
        stream_idle_seconds: float = 10.0,
        **memory: Any,
    ) -> None:
        settings = EngineSettings(
            engine_id=engine_id,
            coordinator=self.address,
            run_id=RUN,
            state_dir=self.directory / "engines",
            backend="memory",
            memory=MemorySettings(tensors=SHAPES, **memory),
            stream_idle_seconds=stream_idle_seconds,
            apply=apply,
            listen=listen,
            tls=self.tls_of(f"engine/{engine_id}"),
        )
        self._start(engine_id, run_engine, settings)

    def _start(self, name: str, run: Any, settings: Any) -> None:
        self.stops[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(run(settings, self.stops[name]))

    async def stop(self, name: str) -> int:
        """End a part in order. Its exit code."""
        self.stops[name].set()
        return await asyncio.wait_for(self.tasks.pop(name), PATIENCE_SECONDS)

    async def close(self) -> None:
        if self._trainer is not None:
            self._trainer.cancel()
        for name in sorted(self.tasks, key=lambda n: n == "coordinator"):
            await self.stop(name)
        for channel in self.channels.values():
            await channel.close()

    def channel(self, address: str) -> grpc.aio.Channel:
        if address not in self.channels:
            self.channels[address] = open_channel(address, self.tls_of("admin/test"))
        return self.channels[address]

    @property
    def fleet(self) -> Any:
        return fleet_pb2_grpc.FleetStub(self.channel(self.address))

    # ---- looking ----

    async def view(self) -> operator_pb2.FleetView:
        stub: Any = operator_pb2_grpc.OperatorStub(self.channel(self.address))
        response = await stub.GetFleet(operator_pb2.GetFleetRequest(), timeout=PATIENCE_SECONDS)
        assert isinstance(response.fleet, operator_pb2.FleetView)
        return response.fleet

    async def engine(self, engine_id: str) -> operator_pb2.EngineView:
        return next(e for e in (await self.view()).engines if e.status.engine.engine_id == engine_id)

    async def status(self, engine_id: str) -> engine_pb2.EngineStatus:
        """Asked of the agent itself."""
        view = await self.engine(engine_id)
        stub: Any = lifecycle_pb2_grpc.LifecycleStub(self.channel(view.endpoint))
        response = await stub.GetStatus(lifecycle_pb2.GetStatusRequest(run_id=RUN), timeout=PATIENCE_SECONDS)
        assert isinstance(response.status, engine_pb2.EngineStatus)
        return response.status

    async def applied(self, engine_id: str) -> int | None:
        status = await self.status(engine_id)
        return status.applied.number if status.HasField("applied") else None

    async def wait_for_engines(self, count: int) -> None:
        async def all_known() -> bool:
            return sum(e.known for e in (await self.view()).engines) == count

        await eventually(all_known)

    async def settled(self) -> None:
        """Wait until every engine that holds what is served, and that nobody holds, is known to take requests: who is
        not is optional to the next update, which does not wait for it."""

        async def all_open() -> bool:
            view = await self.view()
            served = [v for model in view.state.models for v in model.served]
            return all(e.routable or not _could_serve(e, served) for e in view.engines)

        with suppress(AssertionError, grpc.aio.AioRpcError):  # one of half a unit never opens; who asks may not look
            await eventually(all_open, within=SETTLE_SECONDS)

    # ---- writing ----

    async def take_lease(self, *, takeover: bool = False, trainer_id: str = "trainer") -> int:
        """Become the trainer. The session stays open."""
        hello = fleet_pb2.TrainerHello(
            run_id=RUN,
            model="policy",
            trainer_id=trainer_id,
            incarnation=uuid.uuid4().hex,
            ranks=[fleet_pb2.TrainerRankInfo(rank=0, host_id="elsewhere", device_uuid="CPU-other")],
            takeover=takeover,
        )
        self._trainer = self.fleet.Session()
        await self._trainer.write(fleet_pb2.SessionRequest(trainer_hello=hello))
        welcome = await self._trainer.read()
        self.term = welcome.welcome.trainer_term
        return self.term

    async def begin(self, step: int = 0) -> fleet_pb2.BeginUpdateResponse:
        await self.settled()
        request = fleet_pb2.BeginUpdateRequest(
            run_id=RUN,
            model="policy",
            term=self.term,
            request_id=uuid.uuid4().hex,
            step=step,
            layout_digest=LAYOUT.digest,
            byte_count=LAYOUT.byte_count,
        )
        response = await self.fleet.BeginUpdate(request, timeout=PATIENCE_SECONDS)
        assert isinstance(response, fleet_pb2.BeginUpdateResponse)
        return response

    def stream(self, begun: fleet_pb2.BeginUpdateResponse, engine_id: str, **changed: Any) -> Stream:
        """A stream to one engine of the plan; `changed` goes over the open frame's fields."""
        assignment = next(a for a in begun.plan.assignments if a.engine.engine_id == engine_id)
        values: dict[str, Any] = {
            "run_id": RUN,
            "model": "policy",
            "engine": assignment.engine,
            "update_id": begun.update_id,
            "writer_term": self.term,
            "version": begun.version,
            "manifest": weight_update_pb2.Manifest(
                layout_digest=LAYOUT.digest, tensor_count=len(LAYOUT.tensors), byte_count=LAYOUT.byte_count
            ),
            "transport": weight_update_pb2.TRANSPORT_INLINE,
        }
        return Stream(self.channel(assignment.endpoint), weight_update_pb2.UpdateOpen(**values | changed))

    async def decided(self, update_id: str) -> fleet_pb2.UpdateState:
        """Wait for the decision."""
        state = fleet_pb2.UpdateState()
        request = fleet_pb2.WatchUpdateRequest(run_id=RUN, update_id=update_id)
        async for response in self.fleet.WatchUpdate(request, timeout=PATIENCE_SECONDS):
            state = response.state
        return state

    async def push(self, weights: Weights, *, step: int = 0) -> fleet_pb2.UpdateState:
        """A whole update to every engine of the plan."""
        begun = await self.begin(step)
        streams = [self.stream(begun, a.engine.engine_id) for a in begun.plan.assignments]
        await asyncio.gather(*(s.until_ready(weights) for s in streams))
        await self.go(begun.update_id)
        await asyncio.gather(*(s.commit(weights) for s in streams))
        return await self.decided(begun.update_id)

    async def go(self, update_id: str) -> None:
        """Wait until commit frames may go."""
        request = fleet_pb2.WatchUpdateRequest(run_id=RUN, update_id=update_id)
        call = self.fleet.WatchUpdate(request, timeout=PATIENCE_SECONDS)
        async for response in call:
            if response.state.phase >= fleet_pb2.UPDATE_PHASE_GO:
                call.cancel()
                return

    # ---- tokens ----

    async def generate(
        self,
        engine_id: str,
        max_tokens: int,
        *,
        min_version: version_pb2.WeightVersion | None = None,
        wait: float = 30.0,
    ) -> tuple[list[int], list[tuple[int, int, int]], str]:
        """Tokens, spans as (number, start, end), and the finish reason."""
        view = await self.engine(engine_id)
        stub: Any = rollout_pb2_grpc.RolloutStub(self.channel(view.endpoint))
        request = rollout_pb2.GenerateRequest(
            run_id=RUN,
            model="policy",
            prompt_token_ids=[1, 2, 3],
            sampling=rollout_pb2.SamplingParams(max_tokens=max_tokens),
            pin=rollout_pb2.Pin(min_version=min_version),
        )
        request.wait.FromMilliseconds(int(wait * 1000))
        tokens: list[int] = []
        finish = rollout_pb2.Finish()
        async for response in stub.Generate(request, timeout=PATIENCE_SECONDS):
            tokens += response.token_ids
            finish = response.finish
        spans = [(s.version.number, s.start, s.end) for s in finish.spans]
        return tokens, spans, rollout_pb2.FinishReason.Name(finish.reason)

    async def sample_in(self, engine_id: str, max_tokens: int) -> asyncio.Task[tuple[list[int], Any, str]]:
        """A request that the engine has: whatever is stopped from now on, it is not one that nobody has heard of."""
        sample = asyncio.create_task(self.generate(engine_id, max_tokens))

        async def lives() -> bool:
            return (await self.status(engine_id)).live_requests == 1 or sample.done()

        await eventually(lives)
        return sample


@asynccontextmanager
async def local_fleet(
    directory: Path, engines: int = 2, *, channelz: bool = False, **memory: Any
) -> AsyncIterator[LocalFleet]:
    """Coordinator, engines and the trainer's lease."""
    fleet = LocalFleet(directory)
    try:
        await fleet.start_coordinator(channelz=channelz)
        for i in range(engines):
            fleet.start_engine(f"e{i}", **memory)
        await fleet.wait_for_engines(engines)
        await fleet.take_lease()
        yield fleet
    finally:
        await fleet.close()

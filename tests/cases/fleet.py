"""The fleet under test: a coordinator and engine agents in this process over real gRPC, and writers by hand.

On top of `tests.support.local_fleet`: every transport, versions in any number of chunks, engines that crash and come
back on their address, more than one trainer, and notes of everything that was told.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.memory.engine import MemorySettings
from tests.cases.cargo import INLINE, Cargo, Delivery, Segments, Transport
from tests.cases.samples import PROMPT, WITHIN, LiveSample
from tests.cases.sessions import Notes, Session, Trainer
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.writer import SHAPES, Weights
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
)

T = TypeVar("T")


class CaseFleet(LocalFleet):
    """See the module."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.segments = Segments()
        self._notes: list[Notes[Any]] = []
        self._calls: list[Any] = []

    # ---- parts ----

    def start_engine_at(
        self,
        engine_id: str,
        listen: str = "127.0.0.1:0",
        *,
        run_id: str = RUN,
        stream_idle_seconds: float = 10.0,
        **memory: Any,
    ) -> None:
        settings = EngineSettings(
            engine_id=engine_id,
            coordinator=self.address,
            run_id=run_id,
            listen=listen,
            state_dir=self.directory / "engines",
            backend="memory",
            memory=MemorySettings(tensors=SHAPES, **memory),
            stream_idle_seconds=stream_idle_seconds,
            checkpoint_root=self.directory / "checkpoints",
        )
        self._start(engine_id, run_engine, settings)

    async def crash(self, name: str) -> None:
        """End a part without a goodbye."""
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        for notes in self._notes:
            await notes.close()
        for call in self._calls:
            call.cancel()
        await super().close()
        self.segments.close()

    # ---- looking ----

    def note_statuses(self, endpoint: str) -> Notes[engine_pb2.EngineStatus]:
        """What an engine agent says from now on, asked of itself."""
        stub: Any = lifecycle_pb2_grpc.LifecycleStub(self.channel(endpoint))
        call = stub.WatchStatus(lifecycle_pb2.WatchStatusRequest(run_id=RUN))
        return self._note(Notes(call, lambda response: response.status))

    def note_views(self) -> Notes[operator_pb2.FleetView]:
        """What the coordinator shows from now on."""
        stub: Any = operator_pb2_grpc.OperatorStub(self.channel(self.address))
        return self._note(Notes(stub.WatchFleet(operator_pb2.WatchFleetRequest()), lambda response: response.fleet))

    def note_routes(self) -> Notes[fleet_pb2.WatchRoutesResponse]:
        """Where rollout clients are sent from now on."""
        call = self.fleet.WatchRoutes(fleet_pb2.WatchRoutesRequest(model="policy"))
        return self._note(Notes(call, lambda response: response))

    def _note(self, notes: Notes[T]) -> Notes[T]:
        self._notes.append(notes)
        return notes

    async def say_until(self, endpoint: str, check: Callable[[engine_pb2.EngineStatus], bool]) -> None:
        """Ask an agent for its status, one call after the other, until `check` holds."""
        async with asyncio.timeout(WITHIN):
            while not check(await self.status_at(endpoint)):
                pass

    async def status_at(self, endpoint: str) -> engine_pb2.EngineStatus:
        stub: Any = lifecycle_pb2_grpc.LifecycleStub(self.channel(endpoint))
        response = await stub.GetStatus(lifecycle_pb2.GetStatusRequest(run_id=RUN), timeout=PATIENCE_SECONDS)
        assert isinstance(response.status, engine_pb2.EngineStatus)
        return response.status

    async def is_routable(self, engine_id: str) -> bool:
        return (await self.engine(engine_id)).routable

    async def routable_are(self, engine_ids: set[str]) -> bool:
        return {e.status.engine.engine_id for e in (await self.view()).engines if e.routable} == engine_ids

    async def find_engine(self, engine_id: str) -> operator_pb2.EngineView | None:
        return next((e for e in (await self.view()).engines if e.status.engine.engine_id == engine_id), None)

    async def wait_for_a_life_after(self, incarnation: str, engine_id: str = "e0") -> operator_pb2.EngineView:
        """The engine's view once the coordinator hears another life of it."""

        async def came() -> operator_pb2.EngineView:
            view = await self.find_engine(engine_id)
            assert view is not None, f"{engine_id} is not known"
            assert view.known, f"{engine_id} is silent"
            assert view.status.engine.incarnation != incarnation, f"{engine_id} is still the old life"
            return view

        return await eventually(came, within=WITHIN)

    # ---- lifecycle ----

    async def pause(self, engine_id: str, owner: str = "me") -> None:
        view = await self.engine(engine_id)
        stub: Any = lifecycle_pb2_grpc.LifecycleStub(self.channel(view.endpoint))
        request = lifecycle_pb2.PauseGenerationRequest(run_id=RUN, engine=view.status.engine, owner=owner)
        await stub.PauseGeneration(request, timeout=PATIENCE_SECONDS)

    async def resume(self, engine_id: str, owner: str = "me") -> None:
        view = await self.engine(engine_id)
        stub: Any = lifecycle_pb2_grpc.LifecycleStub(self.channel(view.endpoint))
        request = lifecycle_pb2.ResumeGenerationRequest(run_id=RUN, engine=view.status.engine, owner=owner)
        await stub.ResumeGeneration(request, timeout=PATIENCE_SECONDS)

    # ---- writing ----

    async def new_trainer(self, trainer_id: str, **changed: Any) -> Trainer:
        """A trainer says hello and gets the lease. Raises AioRpcError when it is refused."""
        values: dict[str, Any] = {
            "run_id": RUN,
            "model": "policy",
            "trainer_id": trainer_id,
            "incarnation": uuid.uuid4().hex,
            "ranks": [fleet_pb2.TrainerRankInfo(rank=0, host_id="elsewhere", device_uuid="CPU-other")],
        }
        hello = fleet_pb2.TrainerHello(**values | changed)
        session = self.session()
        await session.say(trainer_hello=hello)
        self.term = (await session.welcome()).trainer_term
        return Trainer(session, self.term, hello)

    def session(self) -> Session:
        """A session with the coordinator in which nothing was said yet."""
        stub: Any = fleet_pb2_grpc.FleetStub(self.channel(self.address))
        call = stub.Session()
        self._calls.append(call)
        return Session(call)

    def cargo(self, weights: Weights, transport: Transport = INLINE, count: int = 2) -> Cargo:
        return Cargo(weights, self.segments, transport, count)

    def delivery(self, begun: fleet_pb2.BeginUpdateResponse, engine_id: str, cargo: Cargo, **changed: Any) -> Delivery:
        """An attempt at one engine of the plan; `changed` goes over the open frame's fields."""
        return Delivery(self.stream(begun, engine_id, transport=cargo.transport, **changed), cargo)

    async def deliver(
        self, weights: Weights, transport: Transport = INLINE, count: int = 2, *, step: int = 0, **changed: Any
    ) -> fleet_pb2.UpdateState:
        """A whole update to every engine of the plan, decided. An engine may fail; nobody else does. `changed` goes
        over the open frames' fields."""
        begun = await self.begin(step)
        cargo = self.cargo(weights, transport, count)
        deliveries = [self.delivery(begun, a.engine.engine_id, cargo, **changed) for a in begun.plan.assignments]
        await asyncio.gather(*(d.until_ready() for d in deliveries))
        await self.go(begun.update_id)
        await asyncio.gather(*(d.commit() for d in deliveries))
        return await self.decided(begun.update_id)

    async def deliver_and_fail(self, weights: Weights) -> fleet_pb2.UpdateState:
        """`deliver`, which an engine's failure must keep from a commit."""
        state = await self.deliver(weights)
        assert state.phase == fleet_pb2.UPDATE_PHASE_FAILED
        return state

    # ---- tokens ----

    async def sample(
        self,
        engine_id: str,
        max_tokens: int,
        *,
        min_version: version_pb2.WeightVersion | None = None,
        wait: float = 5.0,
    ) -> LiveSample:
        """A sample that runs. Its refusal, if it is one, comes out of `end`."""
        view = await self.engine(engine_id)
        return self.sample_at(view.endpoint, max_tokens, min_version=min_version, wait=wait)

    def sample_at(
        self,
        endpoint: str,
        max_tokens: int,
        *,
        min_version: version_pb2.WeightVersion | None = None,
        wait: float = 5.0,
    ) -> LiveSample:
        stub: Any = rollout_pb2_grpc.RolloutStub(self.channel(endpoint))
        request = rollout_pb2.GenerateRequest(
            run_id=RUN,
            model="policy",
            prompt_token_ids=PROMPT,
            sampling=rollout_pb2.SamplingParams(max_tokens=max_tokens),
            pin=rollout_pb2.Pin(min_version=min_version),
        )
        request.wait.FromMilliseconds(int(wait * 1000))
        return LiveSample(stub.Generate(request, timeout=PATIENCE_SECONDS))


@asynccontextmanager
async def case_fleet(
    directory: Path, engines: int = 1, *, lease: bool = True, memory: dict[str, Any] | None = None, **coordinator: Any
) -> AsyncIterator[CaseFleet]:
    """Coordinator, engines e0, e1, … and the trainer's lease."""
    fleet = CaseFleet(directory)
    try:
        await fleet.start_coordinator(**coordinator)
        for i in range(engines):
            fleet.start_engine_at(f"e{i}", **memory or {})
        await fleet.wait_for_engines(engines)
        if lease:
            await fleet.take_lease()
        yield fleet
    finally:
        await fleet.close()

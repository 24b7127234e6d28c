"""weightplane.v1.Lifecycle: holds and status. Nothing here can change a version (INV-2)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from controlplane.core import engine_events as events
from controlplane.core.engine_state import Hold, HoldKind
from controlplane.core.errors import WrongIncarnation, WrongRun
from controlplane.rpc.engine_codec import state_to_proto
from engine_agent.life import EngineLife, EngineLifeHolder
from weightplane.v1 import engine_pb2, lifecycle_pb2, lifecycle_pb2_grpc


def status_of(life: EngineLife) -> engine_pb2.EngineStatus:
    """The full state now, with the gate and the word as this agent computes them."""
    return state_to_proto(life.core.state, life.core.served)


class LifecycleService(lifecycle_pb2_grpc.LifecycleServicer):
    """Serves whichever life the engine has now."""

    def __init__(self, holder: EngineLifeHolder) -> None:
        self._holder = holder

    async def PauseGeneration(
        self, request: lifecycle_pb2.PauseGenerationRequest, context: Any
    ) -> lifecycle_pb2.PauseGenerationResponse:
        life = self._fenced(request)
        life.apply(events.HoldChanged(Hold(HoldKind.OPERATOR, request.owner), present=True))
        return lifecycle_pb2.PauseGenerationResponse(status=status_of(life))

    async def ResumeGeneration(
        self, request: lifecycle_pb2.ResumeGenerationRequest, context: Any
    ) -> lifecycle_pb2.ResumeGenerationResponse:
        life = self._fenced(request)
        life.apply(events.HoldChanged(Hold(HoldKind.OPERATOR, request.owner), present=False))
        return lifecycle_pb2.ResumeGenerationResponse(status=status_of(life))

    async def GetStatus(self, request: lifecycle_pb2.GetStatusRequest, context: Any) -> lifecycle_pb2.GetStatusResponse:
        return lifecycle_pb2.GetStatusResponse(status=status_of(self._of_run(request.run_id)))

    async def WatchStatus(
        self, request: lifecycle_pb2.WatchStatusRequest, context: Any
    ) -> AsyncIterator[lifecycle_pb2.WatchStatusResponse]:
        life = self._of_run(request.run_id)
        async for _ in life.state.watch():
            yield lifecycle_pb2.WatchStatusResponse(status=status_of(life))

    def _of_run(self, run_id: str) -> EngineLife:
        life = self._holder.life
        if run_id != life.core.state.run_id:
            raise WrongRun(expected=life.core.state.run_id, got=run_id)
        return life

    def _fenced(
        self, request: lifecycle_pb2.PauseGenerationRequest | lifecycle_pb2.ResumeGenerationRequest
    ) -> EngineLife:
        """The life that the request means. Raises WrongRun, WrongIncarnation."""
        life = self._of_run(request.run_id)
        state = life.core.state
        if (request.engine.engine_id, request.engine.incarnation) != (state.engine_id, state.incarnation):
            raise WrongIncarnation(
                engine_id=state.engine_id, expected=state.incarnation, got=request.engine.incarnation
            )
        return life

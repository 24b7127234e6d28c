"""The state of one update, as the coordinator tells it: what permits commit frames, and what decides.

Promises: nothing but the coordinator's word moves the phase; a broken stream is watched again.
"""

from __future__ import annotations

import asyncio
import random

import grpc
import structlog

from controlplane.core.errors import UpdateAborted
from controlplane.rpc.errors import from_rpc_error
from trainer_agent.agent.reasons import call_passes
from trainer_agent.agent.session import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

log = structlog.get_logger(__name__)

DECIDED = frozenset({fleet_pb2.UPDATE_PHASE_COMMITTED, fleet_pb2.UPDATE_PHASE_DEGRADED, fleet_pb2.UPDATE_PHASE_FAILED})
COMMITS = frozenset({fleet_pb2.UPDATE_PHASE_GO, fleet_pb2.UPDATE_PHASE_COMMITTED, fleet_pb2.UPDATE_PHASE_DEGRADED})
"""Phases in which a commit frame may go: an engine that is ready late still brings itself to the served version."""


class UpdateWatch:
    """Follows one update until it is decided."""

    def __init__(self, fleet: fleet_pb2_grpc.FleetAsyncStub, run_id: str, begun: fleet_pb2.BeginUpdateResponse) -> None:
        self._fleet = fleet
        self._request = fleet_pb2.WatchUpdateRequest(run_id=run_id, update_id=begun.update_id)
        self._decided, self._may_go = asyncio.Event(), asyncio.Event()
        self.state = fleet_pb2.UpdateState(
            update_id=begun.update_id, version=begun.version, phase=fleet_pb2.UPDATE_PHASE_PREPARING
        )
        self.before = self.state
        """The last one before the decision."""

    @property
    def decided(self) -> bool:
        return self.state.phase in DECIDED

    @property
    def commits(self) -> bool:
        """Whether commit frames may go."""
        return self.state.phase in COMMITS

    @property
    def out_of_time(self) -> bool:
        """Whether it was the coordinator's own limit that ended it. Both times are the coordinator's."""
        failed = self.decided and self.state.phase != fleet_pb2.UPDATE_PHASE_COMMITTED
        if not (failed and self.state.HasField("decide_time") and self.before.HasField("deadline_time")):
            return False
        return self.state.decide_time.ToNanoseconds() >= self.before.deadline_time.ToNanoseconds()

    async def run(self) -> None:
        """Follow the update; returns when it is decided, or unknown to the coordinator."""
        backoff = FIRST_BACKOFF_SECONDS
        while not self.decided:
            try:
                await self._stream()
                backoff = FIRST_BACKOFF_SECONDS
            except grpc.aio.AioRpcError as error:
                typed = from_rpc_error(error)
                if not call_passes(typed):
                    await self.fail(str(typed))
                    return
                log.info("update_watch_broken", update_id=self._request.update_id, cause=str(typed))
            if not self.decided:
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, MAX_BACKOFF_SECONDS)

    async def go(self) -> None:
        """Wait until commit frames may go.

        Raises:
            UpdateAborted: the update failed.
        """
        await self._may_go.wait()
        if not self.commits:
            raise UpdateAborted(update_id=self._request.update_id, cause=self.state.cause or "it was given up")

    async def decision(self) -> fleet_pb2.UpdateState:
        """Wait until it is decided."""
        await self._decided.wait()
        return self.state

    async def take(self, state: fleet_pb2.UpdateState) -> None:
        """A newer state, also from another RPC's reply."""
        self.state = state
        if self.decided:
            self._decided.set()
        else:
            self.before = state
        if self.decided or self.commits:
            self._may_go.set()

    async def fail(self, cause: str) -> None:
        """No state will come any more."""
        failed = fleet_pb2.UpdateState()
        failed.CopyFrom(self.state)
        failed.phase, failed.cause = fleet_pb2.UPDATE_PHASE_FAILED, cause
        await self.take(failed)

    async def _stream(self) -> None:
        call = self._fleet.WatchUpdate(self._request)
        try:
            async for response in call:
                await self.take(response.state)
        finally:
            call.cancel()

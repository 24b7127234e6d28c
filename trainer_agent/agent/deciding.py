"""The wait for the coordinator's decision on an update, and what ends it sooner.

Promises: before GO a failure, a refusal or the ranks' limit gives the update up; after GO only time does, for the
agents own their installs. The first word of what went wrong counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from controlplane.core.errors import DeadlineExceeded, StaleTerm, WeightplaneError
from trainer_agent.agent import outcome, stuck
from trainer_agent.agent.begin import abort_update
from trainer_agent.agent.streams import EngineStreams
from trainer_agent.agent.watch import COMMITS, DECIDED, UpdateWatch
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

log = structlog.get_logger(__name__)

REFUSAL_SECONDS = 1.0
"""When a required engine refused and nothing moves: how long its own report may take to reach the coordinator."""
POLL_SECONDS = 0.1
DECIDE_SECONDS = 60.0
"""Beyond the push's limit, once commits went: the coordinator decides by its own limits, if it is there."""


@dataclass
class Failure:
    """What ended a push, if not the coordinator's decision."""

    error: WeightplaneError | None = None
    final: bool = False
    """No repeat can help."""
    said: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with `error`."""

    def say(self, error: WeightplaneError, *, final: bool, step: int) -> None:
        """The first word counts."""
        self.final = self.final or final
        if self.error is None:
            log.info("push_fails", step=step, reason=error.reason, cause=str(error))
            self.error = error
            self.said.set()


@dataclass(frozen=True, slots=True)
class Limit:
    """How long the ranks wait, from when they asked. Seconds of the loop's clock."""

    started: float
    seconds: float

    @property
    def took(self) -> float:
        return now() - self.started

    @property
    def left(self) -> float:
        return max(self.seconds - self.took, 0.0)


@dataclass(frozen=True, slots=True)
class Deciding:
    """One update's."""

    streams: EngineStreams
    watch: UpdateWatch
    failure: Failure
    limit: Limit
    byte_count: int
    """Of the whole version."""
    look: Callable[[stuck.Waited], None]
    """Told in the moment that the limit came, the ranks' or the coordinator's: who was waited for."""

    async def wait(self) -> None:
        """Before GO a failure, a refusal or the limit ends the push; after GO only time does, and a streaming engine
        whose bytes will not come, or not within the limit, is told so: it stands still for them.

        Raises:
            WeightplaneError: it is to be given up.
        """
        watch = self.watch
        decision = asyncio.create_task(watch.decision())
        trouble = asyncio.create_task(self._trouble())
        try:
            await asyncio.wait({decision, trouble}, timeout=self.limit.left, return_when=asyncio.FIRST_COMPLETED)
            if not decision.done() and watch.commits:
                self.streams.abort_unfed(str(trouble.result() if trouble.done() else self._unsent()))
                await asyncio.wait({decision}, timeout=self.limit.left + DECIDE_SECONDS)
            if not decision.done():
                raise trouble.result() if trouble.done() else self._late()
            if watch.out_of_time:
                self.look(self._waited(watch.before))
        finally:
            decision.cancel()
            trouble.cancel()

    def _unsent(self) -> WeightplaneError:
        """After GO the ranks' limit came: they give up what they have not exported."""
        return DeadlineExceeded("push (go)", "the ranks to send everything", round(self.limit.took, 1))

    def _late(self) -> WeightplaneError:
        """The ranks' limit came first."""
        state = self.watch.state
        waited = self._waited(state)
        self.look(waited)
        phase = fleet_pb2.UpdatePhase.Name(state.phase).removeprefix("UPDATE_PHASE_").lower()
        return waited.late(f"push ({phase})", self.limit.took)

    def _waited(self, state: fleet_pb2.UpdateState) -> stuck.Waited:
        """For whom the update waits in `state`."""
        if state.phase in COMMITS:
            return stuck.after_go(state, self.streams.assignments)
        return stuck.before_go(self.streams.progress(), self.byte_count)

    async def _trouble(self) -> WeightplaneError:
        """What makes going on senseless: a failure, a fence, a required engine that refused while all others wait."""
        streams, watch = self.streams, self.watch
        stuck_since: float | None = None
        while self.failure.error is None:
            streams.drop_lost(watch.state)
            if streams.fence is not None:
                return streams.fence
            refused = None if watch.commits else streams.refused
            stuck_since = None if refused is None else stuck_since or now()
            if refused is not None and stuck_since is not None and now() - stuck_since >= REFUSAL_SECONDS:
                errors = streams.told.errors
                return outcome.update_failed(watch.state, f"{refused.engine_id}: {refused.error}", errors)
            await _within(POLL_SECONDS, self.failure.said.wait())
        return self.failure.error


async def give_up(
    fleet: fleet_pb2_grpc.FleetAsyncStub,
    watch: UpdateWatch,
    request: fleet_pb2.AbortUpdateRequest,
    error: WeightplaneError,
) -> None:
    """Before GO nothing was installed, and an abort costs nothing. If GO was faster, the decision is waited for."""
    state = await abort_update(fleet, request)
    if state is not None and state.phase in DECIDED:
        await watch.take(state)
    elif state is not None and not isinstance(error, StaleTerm):
        await _within(DECIDE_SECONDS, watch.decision())
    if not watch.decided:
        await watch.fail(str(error))


def now() -> float:
    return asyncio.get_running_loop().time()


async def _within(seconds: float, something: Awaitable[object]) -> None:
    """Wait for it, but no longer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await something

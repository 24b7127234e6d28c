"""The trainer's session with the coordinator: hello, lease, heartbeats, and coming back after a break.

Promises: heartbeats come from the agent's own loop, so a rank whose interpreter is busy, or that is stopped,
loses no lease by silence; a broken stream is resumed with the term held. Expiry alone fences nobody: only the
coordinator's STALE_TERM ends a session for good.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import grpc
import structlog

from controlplane.core.errors import DeadlineExceeded, WeightplaneError
from controlplane.rpc.codec import seconds_from_proto
from controlplane.rpc.errors import RemoteError, from_rpc_error
from controlplane.rpc.security.diagnosis import Reached
from trainer_agent.agent import reasons
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

log = structlog.get_logger(__name__)

WELCOME_SECONDS = 10.0
"""Longest wait for the answer to a hello."""
FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 2.0
PERSON_SECONDS = 5.0
"""Longest pause while a person must act: how often the log says so."""
GOODBYE_SECONDS = 2.0
MOVING_SECONDS = 0.02
"""How long the news of a step or a phase may wait for the next: a small push has both within it."""

Call = grpc.aio.StreamStreamCall[fleet_pb2.SessionRequest, fleet_pb2.SessionResponse]


class SessionEvents(Protocol):
    """What the agent is told, and by which life's session: that of a life that is over may still have a word."""

    def welcomed(self, incarnation: str, welcome: fleet_pb2.Welcome) -> None:
        """The lease is held, under the welcome's term. Again after each break."""
        ...

    def waiting(self, incarnation: str, error: WeightplaneError) -> None:
        """Not yet; it is tried again."""
        ...

    def refused(self, incarnation: str, error: WeightplaneError) -> None:
        """For good: StaleTerm (fenced), or a fault of the set-up."""
        ...


class FleetSession:
    """One session of one life of the set of ranks, over as many streams as it takes."""

    def __init__(
        self,
        fleet: fleet_pb2_grpc.FleetAsyncStub,
        hello: fleet_pb2.TrainerHello,
        status: Callable[[], fleet_pb2.TrainerStatus],
        events: SessionEvents,
        reached: Reached | None = None,
    ) -> None:
        """`reached`: where the coordinator is, for a look at why it cannot be reached."""
        self._reached = reached or Reached()
        self._fleet = fleet
        self._hello = hello
        self._status = status
        self._events = events
        self._changed = asyncio.Event()
        self._soon: asyncio.TimerHandle | None = None
        self._goodbye: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._backoff = FIRST_BACKOFF_SECONDS
        self._limit = MAX_BACKOFF_SECONDS

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def changed(self) -> None:
        """The status changed: send it now."""
        self._changed.set()

    def moved(self) -> None:
        """A rank went on: send it in a moment, with what follows. Nothing waits for it."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(MOVING_SECONDS, self._tell_moves)

    def _tell_moves(self) -> None:
        self._soon = None
        self._changed.set()

    async def close(self, goodbye: str | None) -> None:
        """End. With a goodbye the lease is given back; without one this is silence, and a next life resumes."""
        if self._task is None:
            return
        self._goodbye = goodbye
        self._changed.set()
        if goodbye is not None:
            await asyncio.wait({self._task}, timeout=GOODBYE_SECONDS)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while self._goodbye is None:
            try:
                await self._stream()
            except WeightplaneError as error:
                if self._goodbye is not None:
                    return
                if not reasons.hello_passes(error):
                    self._events.refused(self._hello.incarnation, error)
                    return
                self._limit = PERSON_SECONDS if reasons.waits_for_a_person(error) else MAX_BACKOFF_SECONDS
                tell = log.warning if reasons.waits_for_a_person(error) else log.info
                tell("session_broken", reason=error.reason, cause=str(error))
                self._events.waiting(self._hello.incarnation, error)
            await asyncio.sleep(self._pause())

    def _pause(self) -> float:
        """Jittered and doubling, so that a restarted coordinator is not met by all agents at once."""
        pause = self._backoff * random.uniform(0.5, 1.0)
        self._backoff = min(self._backoff * 2, self._limit)
        return pause

    async def _stream(self) -> None:
        call = self._fleet.Session()
        try:
            await call.write(fleet_pb2.SessionRequest(trainer_hello=self._hello))
            welcome = await self._welcome(call)
            beat = asyncio.create_task(self._beat(call, seconds_from_proto(welcome.heartbeat_interval)))
            hear = asyncio.create_task(_hear(call))
            try:
                await asyncio.wait({beat, hear}, return_when=asyncio.FIRST_COMPLETED)
                for task in (hear, beat):
                    if task.done():
                        task.result()
            finally:
                beat.cancel()
                hear.cancel()
                await asyncio.gather(beat, hear, return_exceptions=True)
        except grpc.aio.AioRpcError as error:
            raise await self._reached.explained(from_rpc_error(error)) from error
        except asyncio.InvalidStateError:
            # Written after the peer ended the stream: its status says why.
            raise await _status_of(call) from None
        finally:
            call.cancel()

    async def _welcome(self, call: Call) -> fleet_pb2.Welcome:
        try:
            async with asyncio.timeout(WELCOME_SECONDS):
                response = await _first_welcome(call)
        except TimeoutError:
            raise DeadlineExceeded(
                phase="hello", waited_for="the coordinator's welcome", waited_seconds=WELCOME_SECONDS
            ) from None
        self._backoff = FIRST_BACKOFF_SECONDS
        self._hello.held_term = response.welcome.trainer_term
        self._hello.takeover = False
        self._hello.ended_incarnation = ""
        self._events.welcomed(self._hello.incarnation, response.welcome)
        return response.welcome

    async def _beat(self, call: Call, interval: float) -> None:
        while self._goodbye is None:
            self._changed.clear()
            await call.write(fleet_pb2.SessionRequest(trainer_status=self._status()))
            with suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._changed.wait()
        await call.write(fleet_pb2.SessionRequest(goodbye=fleet_pb2.Goodbye(reason=self._goodbye)))
        await call.done_writing()
        async with asyncio.timeout(GOODBYE_SECONDS):
            await call.code()


async def discover_run(
    fleet: fleet_pb2_grpc.FleetAsyncStub,
    model: str,
    waiting: Callable[[WeightplaneError], None],
    reached: Reached | None = None,
) -> str:
    """The coordinator's own run: for trainers that were not told one. Waits until it is reachable.

    Raises:
        WeightplaneError: the coordinator refuses.
    """
    while True:
        call = fleet.WatchRoutes(fleet_pb2.WatchRoutesRequest(model=model))
        try:
            response = await call.read()
            if isinstance(response, fleet_pb2.WatchRoutesResponse):
                return response.run_id
            raise await _status_of(call)
        except grpc.aio.AioRpcError as error:
            typed = await (reached or Reached()).explained(from_rpc_error(error))
            if not reasons.hello_passes(typed):
                raise typed from error
            waiting(typed)
        finally:
            call.cancel()
        await asyncio.sleep(MAX_BACKOFF_SECONDS * random.uniform(0.5, 1.0))


async def _first_welcome(call: Call) -> fleet_pb2.SessionResponse:
    """A state of the fleet that was on its way to everybody may come before it, and is no lease."""
    while (response := await call.read()) is not grpc.aio.EOF:
        assert isinstance(response, fleet_pb2.SessionResponse)
        if response.HasField("welcome"):
            return response
    raise await _status_of(call)


async def _hear(call: Call) -> None:
    """The fleet's state is no concern of a trainer: reading it notices the stream's end."""
    while await call.read() is not grpc.aio.EOF:
        pass
    raise await _status_of(call)


async def _status_of(call: grpc.aio.Call) -> WeightplaneError:
    """Why the peer ended a stream, as an error also where it says OK: a session's end is never success."""
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.OK:
        return RemoteError(code="UNAVAILABLE", text="the coordinator ended the session")
    trailing = await call.trailing_metadata()
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))

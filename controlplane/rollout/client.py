"""The rollout client: asks the coordinator where, and the engines for tokens. No byte goes through the coordinator.

Promises whole samples whose spans cover their tokens exactly (INV-11), and another engine when one cannot serve and
no token has come yet. Refuses to hide a loss: once a token was received an error reaches the caller, since asking
again would be another sample. A coordinator that goes away does not stop rollouts: the last routes stay in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc
import structlog

from controlplane.core import errors as e
from controlplane.core.pins import Pin
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, WeightVersion
from controlplane.rollout.connections import Connections
from controlplane.rollout.routing import Route, Routes, RoutingTable
from controlplane.rollout.sample import Assembly, Delta, Sample
from controlplane.rollout.wire import delta_from_proto, routes_from_proto
from controlplane.rpc.channels import open_channel
from controlplane.rpc.codec import pin_to_proto, sampling_to_proto, seconds_to_proto
from controlplane.rpc.errors import RemoteError, from_rpc_error
from controlplane.rpc.validation import validate
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc

log = structlog.get_logger(__name__)

WATCH_BACKOFF_SECONDS = 0.1
WATCH_BACKOFF_MAX_SECONDS = 2.0
RETRY_PAUSE_SECONDS = 0.25
"""Between two rounds over all engines, unless the routes change earlier."""
SHORTEST_WAIT_SECONDS = 0.05
SETTLE_SECONDS = 0.1
"""How long a request waits for an engine that is usually there, while others could serve it."""

_ELSEWHERE_MAY_DO = (
    e.VersionUnavailable,
    e.EngineNotReady,
    e.EnginePoisoned,
    e.EngineDied,
    e.LimitExceeded,
    e.WrongRun,
    e.WrongModel,
    e.PeerLost,
)


@dataclass(slots=True)
class _Ask:
    """One request of the caller, over all engines that it is tried on."""

    assembly: Assembly
    request: rollout_pb2.GenerateRequest
    started: float
    deadline: float
    """When the caller gives up, tokens or not."""
    patience: float
    """Until when an engine, its gate and the pin are waited for."""
    tried: set[tuple[EngineId, Incarnation]] = field(default_factory=set)
    last_error: e.WeightplaneError | None = None
    settle_by: float = 0.0
    """Until when missing engines are waited for; 0: not yet."""


class RolloutClient:
    """Generates on a fleet's engines. An async context manager; one event loop uses it.

    >>> async with RolloutClient("coordinator:7070") as rollouts:
    ...     sample = await rollouts.generate(prompt_token_ids, SamplingSettings(max_tokens=32))
    """

    def __init__(
        self,
        coordinator: str,
        *,
        model: str = "policy",
        run_id: str | None = None,
        wait_seconds: float = 30.0,
        deadline_seconds: float = 300.0,
    ) -> None:
        """`wait_seconds` bounds the wait for an engine that may serve; `deadline_seconds` a whole sample.

        Without `run_id` the client works for whatever run the coordinator leads.
        """
        self._coordinator = coordinator
        self._model = ModelName(model)
        self._run_id = None if run_id is None else RunId(run_id)
        self._wait_seconds = wait_seconds
        self._deadline_seconds = deadline_seconds
        self._table = RoutingTable()
        self._changed = asyncio.Event()
        self._refused: e.WeightplaneError | None = None
        self._connections = Connections()
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._watch(), name=f"watch-routes-{self._model}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._connections.close()

    @property
    def routes(self) -> Routes | None:
        """What the coordinator last said; None before its first word."""
        return self._table.routes

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        min_version: WeightVersion | None = None,
        exact_version: WeightVersion | None = None,
        max_lag: int | None = None,
        request_id: str = "",
        deadline_seconds: float | None = None,
    ) -> Sample:
        """A whole sample, begun with a version that the pins allow.

        `min_version`: this one or a later one. `exact_version`: this one, for the whole sample; an install ends it as
        `version_changed`. `max_lag`: at most so many fleet commits behind the newest.

        Raises:
            InvalidRequest, FrameInvalid: the request cannot be served anywhere.
            WrongRun: the coordinator leads another run than `run_id`.
            DeadlineExceeded: no engine was routable in time, or the sample did not end in time.
            VersionUnavailable, EngineNotReady, EnginePoisoned, EngineDied, LimitExceeded: the last engine's answer,
                after every engine was tried until `wait_seconds` had passed.
            PeerLost: the engine went away in mid-sample.
            SpanMismatch: the engine's spans do not cover the tokens exactly.
        """
        pin = Pin(min_version, exact_version, max_lag)
        ask = self._new_ask(prompt_token_ids, sampling, pin, request_id, deadline_seconds)
        async with contextlib.aclosing(self._deltas(ask)) as deltas:
            async for _ in deltas:
                pass  # the assembly has taken it
        return ask.assembly.finish()

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        min_version: WeightVersion | None = None,
        exact_version: WeightVersion | None = None,
        max_lag: int | None = None,
        request_id: str = "",
        deadline_seconds: float | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of a sample as they come; the last has `ending`. Raises as `generate` does.

        Closing the generator (`contextlib.aclosing`) aborts the request in the engine.
        """
        pin = Pin(min_version, exact_version, max_lag)
        ask = self._new_ask(prompt_token_ids, sampling, pin, request_id, deadline_seconds)
        async with contextlib.aclosing(self._deltas(ask)) as deltas:
            async for delta in deltas:
                yield delta

    # ---- one request ----------------------------------------------------------------------------

    def _new_ask(
        self,
        prompt: Sequence[int],
        sampling: SamplingSettings,
        pin: Pin,
        request_id: str,
        deadline_seconds: float | None,
    ) -> _Ask:
        now = time.monotonic()
        limit = self._deadline_seconds if deadline_seconds is None else deadline_seconds
        request = self._request(prompt, sampling, pin, request_id or uuid.uuid4().hex)
        return _Ask(
            assembly=Assembly(request.request_id, pin, with_logprobs=sampling.logprobs is not None),
            request=request,
            started=now,
            deadline=now + limit,
            patience=now + min(limit, self._wait_seconds),
        )

    def _request(
        self, prompt: Sequence[int], sampling: SamplingSettings, pin: Pin, request_id: str
    ) -> rollout_pb2.GenerateRequest:
        try:
            return rollout_pb2.GenerateRequest(
                model=self._model,
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=sampling_to_proto(sampling),
                pin=pin_to_proto(pin),
                priority=sampling.priority,
            )
        except (TypeError, ValueError) as error:
            raise e.InvalidRequest(field="prompt_token_ids or sampling", problem=str(error)) from error

    async def _deltas(self, ask: _Ask) -> AsyncGenerator[Delta, None]:
        while True:
            route, run_id = await self._next_route(ask)
            try:
                async with contextlib.aclosing(self._ask_engine(route, run_id, ask)) as deltas:
                    async for delta in deltas:
                        ask.assembly.add(delta)
                        yield delta
                return
            except _ELSEWHERE_MAY_DO as error:
                if ask.assembly.tokens:
                    raise
                log.info("engine_declined", engine=route.engine_id, reason=error.reason, request=ask.request.request_id)
                ask.last_error = error
                ask.tried.add((route.engine_id, route.incarnation))

    async def _ask_engine(self, route: Route, run_id: RunId, ask: _Ask) -> AsyncGenerator[Delta, None]:
        """One attempt on one engine. Ends after a delta with `ending`, or raises."""
        request = ask.request
        request.run_id = run_id
        request.wait.CopyFrom(seconds_to_proto(self._engine_wait(ask)))
        validate(request)
        with self._table.asking(route), self._connections.use(route.endpoint) as channel:
            timeout = max(ask.deadline - time.monotonic(), SHORTEST_WAIT_SECONDS)
            call = rollout_pb2_grpc.RolloutStub(channel).Generate(request, timeout=timeout)
            try:
                async for response in call:
                    delta = delta_from_proto(route.engine_id, response)
                    _refuse_empty_abort(delta, ask)
                    yield delta
                    if delta.ending is not None:
                        return
            except grpc.aio.AioRpcError as error:
                raise self._typed(error, route, ask) from error
            finally:
                call.cancel()
        raise e.PeerLost(peer=route.engine_id, cause="the stream ended without a finish")

    def _engine_wait(self, ask: _Ask) -> float:
        """Half of the patience left, so that another engine can still be tried after this one."""
        return max((ask.patience - time.monotonic()) / 2, SHORTEST_WAIT_SECONDS)

    def _typed(self, error: grpc.aio.AioRpcError, route: Route, ask: _Ask) -> e.WeightplaneError:
        typed = from_rpc_error(error)
        if not isinstance(typed, RemoteError):
            return typed
        if typed.code in ("UNAVAILABLE", "CANCELLED"):
            return e.PeerLost(peer=f"{route.engine_id} at {route.endpoint}", cause=typed.text)
        if typed.code == "DEADLINE_EXCEEDED":
            waited = round(time.monotonic() - ask.started, 1)
            return e.DeadlineExceeded(
                phase="generate", waited_for=f"{route.engine_id} to finish", waited_seconds=waited
            )
        return typed

    # ---- choosing -------------------------------------------------------------------------------

    async def _next_route(self, ask: _Ask) -> tuple[Route, RunId]:
        """Waits, within the request's patience, for an engine that may be asked."""
        while True:
            if self._refused is not None:
                raise self._refused
            candidates = self._table.candidates(ask.assembly.pin, ask.tried)
            left = ask.patience - time.monotonic()
            if candidates and self._table.routes is not None and (left > 0 or ask.last_error is None):
                if not await self._settles(ask, candidates):
                    return self._table.least_loaded(candidates), self._table.routes.run_id
                continue
            if left <= 0:
                raise self._gave_up(ask)
            await self._change(min(left, RETRY_PAUSE_SECONDS) if ask.tried else left)
            ask.tried.clear()

    async def _settles(self, ask: _Ask, candidates: list[Route]) -> bool:
        """Whether the routes changed while a request waited, once, for engines that are usually there.

        After an update the engines come back one after the other; without this a burst of requests would all go to
        the first.
        """
        if ask.tried or len(candidates) >= self._table.usual:
            return False
        now = time.monotonic()
        ask.settle_by = ask.settle_by or now + SETTLE_SECONDS
        if await self._change(max(ask.settle_by - now, 0)):
            return True
        self._table.usual = len(candidates)  # they are gone for longer: nobody waits for them again
        return False

    async def _change(self, timeout: float) -> bool:
        """Whether the routes changed within `timeout`."""
        try:
            return await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            return False

    def _gave_up(self, ask: _Ask) -> e.WeightplaneError:
        if ask.last_error is not None:
            return ask.last_error
        wanted, applied = ask.assembly.pin, self._table.newest_applied()
        if wanted.wants and applied is not None:
            return e.VersionUnavailable(wanted=str(wanted), applied=str(applied))
        waited = round(time.monotonic() - ask.started, 1)
        target = f"a routable engine of model {self._model} from the coordinator at {self._coordinator}"
        return e.DeadlineExceeded(phase="route", waited_for=target, waited_seconds=waited)

    # ---- routes ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follow the coordinator's routes for ever, over its restarts."""
        pause = WATCH_BACKOFF_SECONDS
        async with open_channel(self._coordinator) as channel:
            stub = fleet_pb2_grpc.FleetStub(channel)
            while self._refused is None:
                request = fleet_pb2.WatchRoutesRequest(model=self._model, run_id=self._run_id or "")
                try:
                    async for response in stub.WatchRoutes(request):
                        pause = WATCH_BACKOFF_SECONDS
                        self._take(response)
                except grpc.aio.AioRpcError as error:
                    self._lost(from_rpc_error(error))
                self._table.mark_stale()
                await asyncio.sleep(pause)
                pause = min(pause * 2, WATCH_BACKOFF_MAX_SECONDS)

    def _take(self, response: fleet_pb2.WatchRoutesResponse) -> None:
        self._table.replace(routes_from_proto(response))
        self._connections.keep([r.endpoint for r in response.routes])
        self._wake()

    def _lost(self, error: e.WeightplaneError) -> None:
        if isinstance(error, (e.WrongRun, e.FrameInvalid)):
            self._refused = error  # asking again would be answered the same
            self._wake()
        log.info("routes_lost", coordinator=self._coordinator, reason=error.reason, text=str(error))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _refuse_empty_abort(delta: Delta, ask: _Ask) -> None:
    """An engine that aborts before the first token has lost nothing of the sample: another one may do it."""
    aborted = delta.ending is not None and delta.ending.finish_reason == "abort"
    if aborted and not delta.tokens and not ask.assembly.tokens:
        raise e.EngineNotReady(engine_id=delta.engine_id, holds="it aborted the request before its first token")

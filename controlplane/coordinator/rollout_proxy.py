"""weightplane.v1.Rollout at the coordinator: for grpcurl and simple clients. A bounded pass to the engines.

Promises what an engine promises, since all of it is an engine's word handed on unchanged: tokens with their versions,
errors with their ErrorInfo. Another engine is asked only while nothing was handed on, so no sample is sewn together of
two (INV-11). Nothing is kept: the next message is read from the engine when the caller took the last one. A caller that
goes away, or whose deadline passes, ends its request in the engine. One call more than the limit is refused, so that
agents' sessions never stand behind a crowd.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import structlog
from grpc_status import rpc_status

from controlplane.coordinator.hub import Hub
from controlplane.coordinator.proxied_calls import ProxiedCall, ProxiedCalls
from controlplane.coordinator.proxy_ways import ProxyWay, ProxyWays
from controlplane.core import errors as e
from controlplane.core.fleet_records import EngineRecord
from controlplane.core.traces import Value
from controlplane.core.versions import ModelName
from controlplane.rollout.choosing import Search
from controlplane.rollout.engine_errors import ELSEWHERE_MAY_DO, engine_error, nothing_came
from controlplane.rollout.routing import Route
from controlplane.rpc.codec import pin_from_proto, seconds_from_proto, seconds_to_proto, version_from_proto
from controlplane.rpc.errors import RemoteError
from controlplane.rpc.sample_codec import finish_reason_from_proto
from controlplane.rpc.security import PLAIN, TlsSettings
from controlplane.tracing import UNTRACED, CallTrace, incoming, trace_asked, trace_call
from weightplane.v1 import rollout_pb2, rollout_pb2_grpc

log = structlog.get_logger(__name__)

MAX_CALLS = 64
"""At once, unless told otherwise: as many streams of tokens as one loop passes on beside its agents' sessions."""
DEFAULT_WAIT_SECONDS = 30.0
"""An engine's own: how long an engine, its gate and the pin are waited for."""
LONGEST_CALL_SECONDS = 3600.0
"""Of a caller that has no deadline of its own."""
ABORT_SECONDS = 10.0
"""For the answers of all engines to one Abort."""
ABORTS_AT_ONCE = 64

Asked = TypeVar("Asked", rollout_pb2.GenerateRequest, rollout_pb2.ScoreRequest)


class RolloutProxy(rollout_pb2_grpc.RolloutServicer):
    """Serves every model of the run."""

    def __init__(self, hub: Hub, max_calls: int = MAX_CALLS, tls: TlsSettings = PLAIN) -> None:
        """`tls`: as the coordinator it calls engines. Who may call it was asked at its own port."""
        self._hub = hub
        self._calls = ProxiedCalls(max_calls)
        self._ways = ProxyWays(hub, tls)

    async def close(self) -> None:
        """After the server's: nobody calls any more."""
        await self._ways.close()

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        with trace_call("proxy Generate", incoming(context), context.time_remaining) as trace:
            async with aclosing(self._generate(request, context, trace)) as responses:
                async for response in responses:
                    yield response

    async def _generate(
        self, request: rollout_pb2.GenerateRequest, context: Any, trace: CallTrace
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        trace_asked(trace, request)
        way = self._ways.of(request.run_id, request.model)
        search = _search(request, request.session_id, context)
        with self._calls.enter(request.request_id) as call:
            while True:
                route = await call.unless_aborted(way.next_route(search))
                trace.note({"weightplane.engine_id": route.engine_id})
                try:
                    async with aclosing(_generated(way, route, search, request, call, trace)) as responses:
                        async for response in responses:
                            yield response
                    return
                except (grpc.aio.AioRpcError, *ELSEWHERE_MAY_DO) as error:
                    await _declined(error, route, search, call, context, trace)

    async def Score(self, request: rollout_pb2.ScoreRequest, context: Any) -> rollout_pb2.ScoreResponse:
        way = self._ways.of(request.run_id, request.model)
        search = _search(request, "", context)
        with self._calls.enter(request.request_id) as call:
            while True:
                route = await call.unless_aborted(way.next_route(search))
                try:
                    with way.board.asking(route) as channel:
                        scoring = rollout_pb2_grpc.RolloutStub(channel).Score(
                            _forwarded(request, search), timeout=search.time_left
                        )
                        return await call.unless_aborted(scoring)
                except grpc.aio.AioRpcError as error:
                    await _declined(error, route, search, call, context)

    async def Abort(self, request: rollout_pb2.AbortRequest, context: Any) -> rollout_pb2.AbortResponse:
        """Every engine of the model is asked: a request may also be one that no proxy saw."""
        way = self._ways.of(request.run_id, request.model)
        records = self._hub.core.engines.values()
        engines = [r for r in records if r.session is not None and r.state.model == ModelName(request.model)]
        at_once = asyncio.Semaphore(ABORTS_AT_ONCE)
        limit = min(ABORT_SECONDS, _time_remaining(context))
        answers = await asyncio.gather(*(_aborted(way, r, request, at_once, limit) for r in engines))
        names = [name for answer in answers if not isinstance(answer, e.PeerLost) for name in answer]
        names += self._calls.abort_waiting(frozenset(request.request_ids))
        for answer in answers:
            if isinstance(answer, e.PeerLost):
                raise e.PeerLost(
                    peer=answer.peer, cause=f"{answer.cause}; {len(names)} were ended elsewhere; ask again"
                )
        return rollout_pb2.AbortResponse(request_ids=list(dict.fromkeys(names)))


def _search(request: rollout_pb2.GenerateRequest | rollout_pb2.ScoreRequest, session_id: str, context: Any) -> Search:
    now = time.monotonic()
    limit = min(_time_remaining(context), LONGEST_CALL_SECONDS)
    wait = seconds_from_proto(request.wait) if request.HasField("wait") else DEFAULT_WAIT_SECONDS
    return Search(
        model=ModelName(request.model),
        pin=pin_from_proto(request.pin),
        session_id=session_id,
        started=now,
        deadline=now + limit,
        patience=now + min(wait, limit),
    )


def _time_remaining(context: Any) -> float:
    remaining = context.time_remaining()
    return math.inf if remaining is None else float(remaining)


def _forwarded(request: Asked, search: Search) -> Asked:
    """The same, with the wait that is left."""
    copy = type(request)()
    copy.CopyFrom(request)
    copy.wait.CopyFrom(seconds_to_proto(search.engine_wait))
    return copy


async def _generated(
    way: ProxyWay,
    route: Route,
    search: Search,
    request: rollout_pb2.GenerateRequest,
    call: ProxiedCall,
    trace: CallTrace,
) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
    """What one engine says, as it says it. Closing this ends the request there."""
    ended = 0
    with way.board.asking(route) as channel:
        stub: Any = rollout_pb2_grpc.RolloutStub(channel)
        asked = _forwarded(request, search)
        stream = stub.Generate(asked, timeout=search.time_left, metadata=trace.metadata)
        try:
            while ended < max(request.sampling.n, 1):
                response = await (stream.read() if call.begun else call.unless_aborted(stream.read()))
                if response is grpc.aio.EOF:
                    raise e.PeerLost(peer=route.engine_id, cause="the stream ended without a finish")
                if not call.begun:
                    _refuse_empty_end(route, response, call)
                call.begun = True
                ended += response.HasField("finish")
                _trace_response(trace, response)
                yield response
        finally:
            stream.cancel()


def _trace_response(trace: CallTrace, response: rollout_pb2.GenerateResponse) -> None:
    if not trace.on:
        return
    trace.made(len(response.token_ids))
    if response.HasField("finish"):
        finish = response.finish
        spans = [f"{version_from_proto(s.version)}:{s.start}-{s.end}" for s in finish.spans]
        reason = finish_reason_from_proto(finish.reason)
        why = finish.stop_reason if reason == "abort" else ""
        trace.finished(reason, why, spans, finish.cached_prompt_tokens)


def _refuse_empty_end(route: Route, response: rollout_pb2.GenerateResponse, call: ProxiedCall) -> None:
    """Raises what another engine may still do better."""
    if response.token_ids or not response.HasField("finish"):
        return
    finish = response.finish
    error = nothing_came(route.engine_id, call.name, finish_reason_from_proto(finish.reason), finish.stop_reason)
    if error is not None:
        raise error


async def _declined(
    error: Exception, route: Route, search: Search, call: ProxiedCall, context: Any, trace: CallTrace = UNTRACED
) -> None:
    """Returns where another engine may be asked; ends the call, in the engine's own words, where none may."""
    typed = engine_error(error, route, search) if isinstance(error, grpc.aio.AioRpcError) else error
    assert isinstance(typed, e.WeightplaneError)  # of the tree, or made from gRPC's
    if not call.begun and isinstance(typed, ELSEWHERE_MAY_DO) and time.monotonic() < search.patience:
        log.info("engine_declined", engine=route.engine_id, reason=typed.reason, text=str(typed), request=call.name)
        declined: dict[str, Value] = {"weightplane.engine_id": route.engine_id, "error.type": typed.reason}
        trace.happened("engine declined", declined)
        search.tried.add((route.engine_id, route.incarnation))
        search.last_error = typed
        return
    trace.failed(typed.reason, str(typed))
    if isinstance(error, grpc.aio.AioRpcError):
        await _hand_on(error, typed, context)
    raise typed


async def _hand_on(error: Any, typed: e.WeightplaneError, context: Any) -> None:
    """The engine's status as it gave it. Returns where it gave none: gRPC itself broke the call."""
    status = rpc_status.from_call(error)
    if status is not None:
        await context.abort_with_status(rpc_status.to_status(status))
    if isinstance(typed, RemoteError):
        await context.abort(error.code(), error.details() or "")


async def _aborted(
    way: ProxyWay, record: EngineRecord, request: rollout_pb2.AbortRequest, at_once: asyncio.Semaphore, limit: float
) -> list[str] | e.PeerLost:
    """What one engine ended; PeerLost as a value where it did not answer, so that the others do."""
    engine_id = record.place.engine_id
    try:
        async with asyncio.timeout(limit), at_once:
            with way.connections.use(record.place.endpoint) as channel:
                answer = await rollout_pb2_grpc.RolloutStub(channel).Abort(request, timeout=limit)
    except (grpc.aio.AioRpcError, TimeoutError) as error:
        cause = error.details() if isinstance(error, grpc.aio.AioRpcError) else f"no answer within {limit} s"
        return e.PeerLost(peer=engine_id, cause=str(cause))
    return list(answer.request_ids)

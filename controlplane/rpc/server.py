"""How we serve: one way to build a server, for the coordinator and for both agents.

Every handler runs inside one interceptor that asks who calls, validates what comes in, turns typed errors into
statuses, and lets no foreign exception's text out. The port is bound before anyone is told of it.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from controlplane.config import ConfigError
from controlplane.core.errors import FrameInvalid, RateLimited, WeightplaneError
from controlplane.rpc.bulk import BulkFrame
from controlplane.rpc.channels import SERVER_OPTIONS
from controlplane.rpc.documented import enable_documented_reflection
from controlplane.rpc.errors import to_status
from controlplane.rpc.metrics import INTERNAL_ERRORS, REFUSALS
from controlplane.rpc.ports import PortUnavailable
from controlplane.rpc.security.guard import Guard, ServerSecurity
from controlplane.rpc.validation import validate

log = structlog.get_logger(__name__)

MAX_CONCURRENT_RPCS = 4096
"""Streams and calls at once; each agent keeps one or two open, each running sample one."""
STOP_GRACE_SECONDS = 2.0
REPEATED_BYTES = 16 * 1024
"""A stream's frame up to this size is kept until the next one, which may say the same."""


@dataclass
class RunningServer:
    """A server that listens. `address` has the port that was really bound."""

    server: grpc.aio.Server
    health: HealthServicer
    address: str
    services: tuple[str, ...]
    _said: dict[str, bool] = field(default_factory=dict)
    """Readiness, as it was told last."""

    async def set_serving(self, serving: bool, *, besides: Collection[str] = ()) -> None:
        """Readiness, for the whole and for each service. `besides`: services that answer whatever the whole does."""
        for name in ("", *self.services):
            good = serving or name in besides
            if self._said.get(name) is good:
                continue
            self._said[name] = good
            state = health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING
            await self.health.set(name, state)

    async def stop(self) -> None:
        await self.health.enter_graceful_shutdown()
        await self.server.stop(STOP_GRACE_SECONDS)


OPEN = ServerSecurity()


async def start_server(
    listen: str, register: Iterable[Callable[[grpc.aio.Server], str]], security: ServerSecurity = OPEN
) -> RunningServer:
    """Bind `listen` (host:port; port 0 for any free one), register services, and serve.

    Each item of `register` adds a servicer and returns its service's full name. Health says NOT_SERVING until
    `set_serving`.

    Raises:
        PortUnavailable: with the address.
        ConfigError: the address is open to others without TLS, or the files of `security` cannot be used.
    """
    guard = _guard(security)
    server = grpc.aio.server(
        interceptors=[_Boundary(guard)], options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS
    )
    names = tuple(add(server) for add in register)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    enable_documented_reflection((*names, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
    try:
        port = guard.bind(server, listen)
    except ValueError as error:
        raise ConfigError("", str(error)) from error
    except RuntimeError as error:
        raise PortUnavailable(f"cannot listen on {listen}: it is in use, or not an address of this host") from error
    running = RunningServer(server, health, f"{listen.rpartition(':')[0]}:{port}", names)
    await running.set_serving(False)  # INV-10: whoever serves says so when it can; an open port is no readiness
    await server.start()
    return running


def _guard(security: ServerSecurity) -> Guard:
    try:
        return Guard(security)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("", str(error)) from error


class _Boundary(grpc.aio.ServerInterceptor):
    """The outermost layer of every call: who calls is asked, validation in, typed errors out."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        ours = method.startswith("/weightplane.")
        if handler is None:
            return None
        inner = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        # Reflection and health are not ours: their messages declare no rules.
        whole, stream = (_checked, _checked_stream) if ours else (_decoded, _decoded_stream)
        check: Callable[[Any], Any] = whole
        if handler.request_streaming:
            check = partial(stream, _decoder(handler.request_deserializer))
        # Those of health write their answers, and yield none.
        yields = handler.response_streaming and (ours or inspect.isasyncgenfunction(inner))
        wrap = _stream_response if yields else _unary_response
        return _handler_like(handler, wrap(inner, check, method, self._guard))


def _handler_like(handler: Any, behaviour: Any) -> grpc.RpcMethodHandler[Any, Any]:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(handler.request_streaming, handler.response_streaming)]
    # Of a stream each frame is decoded when it is read, unless it says once more what the one before it said.
    decode = None if handler.request_streaming else _decoder(handler.request_deserializer)
    made: grpc.RpcMethodHandler[Any, Any] = make(behaviour, decode, handler.response_serializer)
    return made


class _Undecodable:
    """What came in place of a message. gRPC itself would end the call with an error that says nothing."""


def _decoder(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return _UNDECODABLE

    return decoded


_UNDECODABLE = _Undecodable()


def _decoded(request: Any) -> Any:
    if request is _UNDECODABLE:
        raise FrameInvalid(message="request", field="bytes", problem="they are no message of this call")
    return request


def _checked(request: Any) -> Any:
    validate(_decoded(request))
    return request


async def _checked_stream(decode: Callable[[bytes], Any], requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """A frame that is byte for byte the one before it, such as a heartbeat, is that very object, and not decoded or
    validated again."""
    before, request = b"", None
    async for data in requests:
        if request is None or data != before:
            before, request = data, _decoded(decode(data))
            validate(request.frame if isinstance(request, BulkFrame) else request)
        yield request
        if len(before) > REPEATED_BYTES:
            before, request = b"", None


async def _decoded_stream(decode: Callable[[bytes], Any], requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in requests:
        yield _decoded(decode(data))


def _unary_response(inner: Any, check: Callable[[Any], Any], method: str, guard: Guard) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            guard.admit(method, context)
            return await inner(check(request), context)
        except Exception as error:
            await _abort(context, error, method)

    return call


def _stream_response(inner: Any, check: Callable[[Any], Any], method: str, guard: Guard) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            guard.admit(method, context)
            # Closed at once when the caller leaves: a handler's clean-up must not wait for the collector.
            async with aclosing(inner(check(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(context, error, method)

    return call


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    """Ends the call with the error's status. CancelledError never comes here: it is no Exception."""
    if isinstance(error, WeightplaneError):
        REFUSALS.labels(method, error.reason).inc()
        tell = log.debug if isinstance(error, RateLimited) else log.info  # a flood is counted, not written down
        tell("call_refused", method=method, reason=error.reason, text=str(error))
        await context.abort_with_status(to_status(error))
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, NotImplementedError):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served here")
    INTERNAL_ERRORS.labels(method).inc()
    error_id = uuid.uuid4().hex[:12]
    log.error("call_failed", method=method, error_id=error_id, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error {error_id}; the log has its cause")


async def wait_for_signal(stop: asyncio.Event, hurry: asyncio.Event | None = None) -> None:
    """Return when `stop` is set, or at SIGINT or SIGTERM (which set it). Each later one sets `hurry`: whoever ends in
    order then ends at once."""

    def signalled() -> None:
        if stop.is_set() and hurry is not None:
            hurry.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    await stop.wait()

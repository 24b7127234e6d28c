"""The door: what of the API app may be reached, and when.

Promises: only the listed routes; who calls is asked first, where the agent's own port asks; a request that generates
waits outside the gate, bounded, or gets 503 with the reason, and nothing of it runs on once its caller is gone; answers
name the versions that made their tokens. `/health` is the gate, and everybody's. The app and its engine client are one
life's; between lives there is none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog

from controlplane.core import errors as e
from controlplane.core.pins import ANY
from controlplane.core.traces import SpanRef, parse_traceparent
from controlplane.rpc.security import PLAIN, HttpGuard
from controlplane.tracing import CallTrace, trace_call
from engine_agent.life.engine_life import EngineLife, EngineLifeHolder
from engine_agent.openai_door.answers import App, Message, Receive, Scope, Send, VersionedAnswer, refuse, say
from engine_agent.openai_door.settings import OpenAiSettings
from engine_agent.openai_door.visit import Visit, current
from engine_agent.services.entry import enter

log = structlog.get_logger(__name__)

HEALTH = ("GET", "/health")
GENERATING = frozenset({("POST", "/v1/completions"), ("POST", "/v1/chat/completions")})
READING = frozenset({("GET", "/v1/models"), ("GET", "/version"), ("POST", "/tokenize"), ("POST", "/detokenize")})
"""Of the app, without tokens of the engine's. All else that the app has stays inside: sleep, pause, weights, LoRA."""
PEER = "weightplane_peer"
"""Where the server keeps a caller's certificate, in a request's state."""
UNASKED = HttpGuard(PLAIN)
BODY_SECONDS = 60.0
"""For a caller to send its request."""


class TooLong(Exception):
    """A body above the limit."""


class Door:
    """An ASGI app that lives as long as the agent."""

    def __init__(
        self,
        holder: EngineLifeHolder,
        settings: OpenAiSettings,
        build: Callable[[EngineLife], Awaitable[App]],
        guard: HttpGuard = UNASKED,
    ) -> None:
        """`build` makes the API app over the engine of one life."""
        self._guard = guard
        self._holder = holder
        self._settings = settings
        self._build = build
        self._app: App | None = None
        self._here = 0

    async def open(self, life: EngineLife) -> None:
        """The engine has started. Raises EngineDied."""
        self._app = await self._build(life)

    def shut(self) -> None:
        """The life is over. Who is inside is told so by its engine."""
        self._app = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # web sockets are refused so, and there is no lifespan to take part in
        route = (scope["method"], scope["path"])
        if route == HEALTH:
            await self._health(send)
        elif route not in GENERATING | READING:
            await say(send, 404, f"{route[0]} {route[1]} is not served here", "NOT_FOUND")
        elif (refusal := self._refusal(scope)) is not None:
            await refuse(send, refusal)
        elif self._here >= self._settings.max_requests:
            limit = self._settings.max_requests
            await refuse(send, e.LimitExceeded(what="requests at the door", limit=limit, got=limit + 1))
        else:
            async with self._counted():
                await self._serve(scope, receive, send, generates=route in GENERATING)

    def _refusal(self, scope: Scope) -> e.WeightplaneError | None:
        """Before anything of the request is read."""
        shown = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        try:
            self._guard.admit(f"openai {scope['path']}", shown, scope.get("state", {}).get(PEER))
        except (e.Unauthenticated, e.PermissionDenied) as error:
            return error
        return None

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self._here += 1
        try:
            yield
        finally:
            self._here -= 1

    async def _health(self, send: Send) -> None:
        life = self._holder.life
        if self._app is None:
            await refuse(send, no_app(life))
        elif life.open:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            state = life.core.state
            holds = ", ".join(sorted(map(str, state.holds))) or state.word(life.core.served)
            await refuse(send, e.EngineNotReady(engine_id=state.engine_id, holds=holds))

    async def _serve(self, scope: Scope, receive: Receive, send: Send, *, generates: bool) -> None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(receive, self._settings.max_body_bytes)
        except TooLong:
            return await say(send, 413, f"at most {self._settings.max_body_bytes} bytes", "LIMIT_EXCEEDED")
        except TimeoutError:
            return await say(send, 408, f"the request did not come within {BODY_SECONDS} s", "DEADLINE_EXCEEDED")
        if body is None:
            return None  # its caller went away
        gone = asyncio.ensure_future(_gone(receive))
        serving = self._generate if generates else self._read
        work = asyncio.ensure_future(serving(scope, _Replay(body, gone), send))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        return None

    async def _read(self, scope: Scope, replay: _Replay, send: Send) -> None:
        if self._app is None:
            await refuse(send, no_app(self._holder.life))
        else:
            await self._app(scope, replay, send)

    async def _generate(self, scope: Scope, replay: _Replay, send: Send) -> None:
        with trace_call("door Generate", _traced(scope)) as trace:
            await self._visited(scope, replay, send, trace)

    async def _visited(self, scope: Scope, replay: _Replay, send: Send, trace: CallTrace) -> None:
        life = self._holder.life
        visit = Visit(asyncio.get_running_loop().time() + self._settings.wait_seconds, trace=trace)
        trace.note({"http.route": scope["path"], "weightplane.engine_id": life.core.state.engine_id})
        try:
            _refuse_beams(replay.body)
            trace.entered(str(await enter(life, ANY, visit.wait_left)))
            if self._app is None:
                raise no_app(self._holder.life)
        except e.WeightplaneError as error:
            log.info("door_refused", reason=error.reason, text=str(error))
            trace.failed(error.reason, str(error))
            return await refuse(send, error)
        current.set(visit)
        try:
            return await self._app(scope, replay, VersionedAnswer(send, visit).send)
        finally:
            await visit.leave()
            trace.wanted(visit.choices)
            if visit.error is not None:
                trace.failed(visit.error.reason, str(visit.error))


def _traced(scope: Scope) -> SpanRef | None:
    """The caller's span, by its `traceparent`."""
    found = [value for name, value in scope["headers"] if name == b"traceparent"]
    return parse_traceparent(found[0].decode("latin-1")) if len(found) == 1 else None


def no_app(life: EngineLife) -> e.EngineNotReady:
    return e.EngineNotReady(engine_id=life.core.state.engine_id, holds="it starts or ends")


def _refuse_beams(body: bytes) -> None:
    """A beam is many requests that vLLM makes of one: which version made its tokens nobody could say (INV-11)."""
    with suppress(ValueError):
        asked: Any = json.loads(body)
        if isinstance(asked, dict) and asked.get("use_beam_search"):
            raise e.InvalidRequest(field="use_beam_search", problem="the tokens of a beam have no version")


class _Replay:
    """The request once more, for the app; afterwards whatever its caller does, which is to leave."""

    def __init__(self, body: bytes, gone: asyncio.Future[Message]) -> None:
        self.body = body
        self._gone = gone
        self._told = False

    async def __call__(self) -> Message:
        if not self._told:
            self._told = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        return await asyncio.shield(self._gone)


async def _body(receive: Receive, limit: int) -> bytes | None:
    """None: its caller went away. Raises TooLong."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise TooLong
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _gone(receive: Receive) -> Message:
    """When the caller has left."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return message

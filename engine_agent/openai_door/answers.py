"""What the door itself says, in the shape that OpenAI's clients read; and versions in front of what the app says."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from controlplane.core import errors as e
from controlplane.rpc.metrics import REFUSALS
from controlplane.rpc.security import http
from engine_agent.openai_door.visit import Visit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

VERSION_HEADER = "x-weightplane-version"
SPANS_HEADER = "x-weightplane-spans"
REASON_HEADER = "x-weightplane-reason"
RETRY_AFTER_SECONDS = 1
"""An update pauses an engine for less; another engine may be asked at once."""
DONE = b"data: [DONE]"
"""With which the app ends a stream of events."""

_NOT_NOW = (
    e.EngineNotReady,
    e.EnginePoisoned,
    e.EngineDraining,
    e.EngineDied,
    e.LimitExceeded,
    e.RequestAborted,
)


def status_of(error: e.WeightplaneError) -> int:
    if (refused := http.status_of(error)) is not None:
        return refused
    if isinstance(error, _NOT_NOW):
        return 503
    return 400 if isinstance(error, (e.InvalidRequest, e.UnsupportedByEngine)) else 500


async def refuse(send: Send, error: e.WeightplaneError) -> None:
    """503 says when to come again; nothing was done."""
    status = status_of(error)
    REFUSALS.labels("openai", error.reason).inc()
    headers = {REASON_HEADER: error.reason} | ({"retry-after": str(RETRY_AFTER_SECONDS)} if status == 503 else {})
    headers |= dict([http.BEARER_HEADER]) if status == 401 else {}
    await say(send, status, str(error), error.reason, headers)


async def say(send: Send, status: int, text: str, reason: str, headers: dict[str, str] | None = None) -> None:
    said = {"message": text, "type": reason, "param": None, "code": status}
    body = json.dumps({"error": said}).encode()
    named = {"content-type": "application/json", "content-length": str(len(body))} | (headers or {})
    await send({"type": "http.response.start", "status": status, "headers": _headers(named)})
    await send({"type": "http.response.body", "body": body})


def _headers(named: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in named.items()]


class VersionedAnswer:
    """The app's answer on its way out.

    Its head waits for its first body: only then is it known which version made the tokens, and whether there are any.
    What the engine refused is told as what it is, and not as the app puts it.
    """

    def __init__(self, send: Send, visit: Visit) -> None:
        self._send = send
        self._visit = visit
        self._head: Message | None = None
        self._over = False

    async def send(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start":
            self._head = message
            return
        if message["type"] == "http.response.body":
            if self._head is not None and not await self._begin(self._head):
                return
            message = self._with_spans(message)
        await self._send(message)

    async def _begin(self, head: Message) -> bool:
        """Whether the app's answer goes out."""
        self._head = None
        if self._visit.error is not None and not self._visit.tokens:
            self._over = True
            await refuse(self._send, self._visit.error)
            return False
        streamed = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in head["headers"])
        await self._send({**head, "headers": [*head["headers"], *_headers(self._versions(streamed=streamed))]})
        return True

    def _versions(self, *, streamed: bool) -> dict[str, str]:
        """A stream's head goes before its end: it names the version that the first token has."""
        version = self._visit.first if streamed else self._visit.only_version
        spans = "" if streamed else self._visit.spans
        named = {VERSION_HEADER: "" if version is None else str(version.number), SPANS_HEADER: spans}
        return {name: value for name, value in named.items() if value}

    def _with_spans(self, message: Message) -> Message:
        """A comment before a stream's last event says who made which tokens."""
        body, spans = message.get("body", b""), self._visit.spans
        if not body.startswith(DONE) or not spans:
            return message
        return {**message, "body": f": {SPANS_HEADER} {spans}\n\n".encode() + body}

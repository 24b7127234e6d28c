"""Bounded calls to a vLLM server, and vLLM's own calls as its routes.

Promises that a call ends within its limit, and in one of four ways: an answer, a refusal that the server itself gave
(`ServerRefused`), no answer in time (DeadlineExceeded), or no server (EngineDied, which ends this life). A label counts
as set only when the server said so; nothing else moves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp

from controlplane.core.errors import DeadlineExceeded, EngineDied
from engine_agent.external.receipts import Receipts

T = TypeVar("T")

READ_BUFFER_BYTES = 1 << 20
"""A line of a token stream with its log probabilities is far below."""
SHOWN_CHARACTERS = 500
"""Of a server's refusal."""


class ServerRefused(Exception):
    """The server lives and said no."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__(f"{path}: {status}: {text[:SHOWN_CHARACTERS]}")
        self.status = status
        self.text = text


class Server:
    """One server, one life. Made on the event loop that uses it; the calls of `engine_agent.vllm.calls.Calls`."""

    def __init__(self, url: str, engine_id: str, on_death: Callable[[EngineDied], None]) -> None:
        self._engine_id = engine_id
        self._on_death = on_death
        self._death: EngineDied | None = None
        # A connection for each call: the server closes idle ones, and a call on one of those looks like its death.
        self.http = aiohttp.ClientSession(
            url,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=READ_BUFFER_BYTES,
            trust_env=False,
        )
        self.llm = Routes(self)
        self.world_size = 0
        """Workers that must answer; known once it was attached to."""

    @property
    def engine_id(self) -> str:
        return self._engine_id

    @property
    def dead(self) -> bool:
        return self._death is not None

    def raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDied(self._engine_id, self._death.cause)

    def died(self, cause: str) -> EngineDied:
        """Note the end of this life, once, and tell those who wait."""
        if self._death is None:
            self._death = EngineDied(self._engine_id, cause)
            self._on_death(self._death)
        return EngineDied(self._engine_id, self._death.cause)

    async def close(self) -> None:
        await self.http.close()

    # ---- calls ----

    async def ask(self, call: Awaitable[T], what: str, limit_seconds: float) -> T:
        """The call's result. Raises EngineDied, DeadlineExceeded, ServerRefused."""
        try:
            async with asyncio.timeout(limit_seconds):
                return await call
        except TimeoutError:
            self.raise_if_dead()
            raise DeadlineExceeded(what, f"the server of {self._engine_id}", limit_seconds) from None

    async def call(self, method: str, path: str, json: Any = None) -> Any:
        """The answer's JSON; None where it has none. Raises EngineDied, ServerRefused."""
        self.raise_if_dead()
        try:
            # A redirect is a refusal: what goes over loopback is not sent on to elsewhere.
            async with self.http.request(method, path, json=json, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise ServerRefused(path, answer.status, await answer.text(errors="replace"))
                return await answer.json() if answer.content_type == "application/json" else None
        except (aiohttp.ClientError, OSError) as error:
            raise self.died(f"{path}: {type(error).__name__}: {error}") from error

    async def collect(self, method: str, limit_seconds: float) -> list[dict[str, Any]]:
        """One answer of each worker, in rank order; fewer answers than workers is a death."""
        call = self.call("POST", "/collective_rpc", {"method": method})
        answers = (await self.ask(call, method, limit_seconds))["results"]
        if sorted(a["rank"] for a in answers) != list(range(self.world_size)):
            raise self.died(f"{method}: {len(answers)} of {self.world_size} workers answered")
        return sorted(answers, key=lambda a: int(a["rank"]))

    async def tell(self, method: str, limit_seconds: float) -> None:
        await self.ask(self.call("POST", "/collective_rpc", {"method": method}), method, limit_seconds)

    def init_request(self, told: dict[str, Any]) -> Any:
        return told

    def update_request(self, step: dict[str, Any]) -> Any:
        return step

    def answered(self, error: Exception) -> bool:
        return isinstance(error, ServerRefused)


class Routes:
    """vLLM's calls under their own names, as the server's routes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.receipts = Receipts()
        self._labelling = asyncio.Lock()

    async def is_paused(self) -> bool:
        return (await self._server.call("GET", "/is_paused"))["is_paused"] is True

    async def init_weight_transfer_engine(self, told: dict[str, Any]) -> None:
        await self._server.call("POST", "/init_weight_transfer_engine", {"init_info": told})

    async def start_weight_update(self) -> None:
        await self._server.call("POST", "/start_weight_update")

    async def start_draft_weight_update(self) -> None:
        await self._server.call("POST", "/start_draft_weight_update")

    async def update_weights(self, step: dict[str, Any]) -> None:
        await self._server.call("POST", "/update_weights", {"update_info": step})

    async def finish_weight_update(self, label: str | None = None) -> None:
        if label is None:
            await self._server.call("POST", "/finish_weight_update", {})
        else:
            await self._set_label("/finish_weight_update", "weight_version", label)

    async def update_weight_version(self, label: str) -> None:
        await self._set_label("/update_weight_version", "new_version", label)

    async def _set_label(self, path: str, field: str, label: str) -> None:
        """INV-1: the receipt is this engine's only after the answer 200; no answer, no label that counts."""
        async with self._labelling:
            receipt = self.receipts.issue(label)
            await self._server.call("POST", path, {field: receipt})
            self.receipts.took(receipt)

    async def label(self) -> str:
        """What the server shows, whoever set it."""
        return str((await self._server.call("GET", "/weight_info"))["weight_version"])

    async def check_label(self) -> None:
        """A round trip through the core that reads the label back. Raises EngineDied: it is none that this agent set,
        so the server was replaced, or written by another."""
        async with self._labelling:
            shown = await self.label()
            expected = self.receipts.present
        if shown != expected:
            raise self._server.died(
                f"the server shows the label {shown!r} where this agent set {expected!r}: it was replaced, or written "
                "by another; it is nobody's until an update of this agent's"
            )

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        asked = f"reset_running_requests={_word(reset_running_requests)}&reset_external={_word(reset_connector)}"
        return (await self._server.call("POST", f"/reset_prefix_cache?{asked}"))["success"] is True

    async def reset_mm_cache(self) -> None:
        await self._server.call("POST", "/reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._server.call("POST", "/reset_encoder_cache")

    async def pause(self, mode: str) -> None:
        await self._server.call("POST", f"/pause?mode={mode}&clear_cache=false")

    async def resume(self) -> None:
        await self._server.call("POST", "/resume")

    async def abort_all(self) -> None:
        await self._server.call("POST", "/abort_requests", {})

    async def live(self) -> dict[str, int]:
        """Tokens that the server handed on for each request that it has, when all that its core made was handed on."""
        answer: dict[str, int] = (await self._server.call("GET", "/weightplane/live"))["tokens"]
        return answer


def _word(value: bool) -> str:
    return "true" if value else "false"

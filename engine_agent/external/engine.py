"""The engine port over a vLLM server that somebody else started.

Promises what `engine_agent.engine.Engine` says, as far as the server lets it (`capabilities`). The server's weights are
nobody's when this agent comes: no label found there is adopted (INV-1). They are a version only after the server itself
answered that it took the label that this agent made for that one install; each probe reads it back, and another label
ends this life. The process is not the agent's: it is neither started nor ended here, and is left paused.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from controlplane.core.canary import Canary
from controlplane.core.engine_streaming import STREAMING
from controlplane.core.errors import (
    CanaryFailed,
    DeadlineExceeded,
    EngineDied,
    EngineNotReady,
    InstallFailed,
    InstallTimedOut,
    InvalidRequest,
    IpcNotPossible,
    RequestAborted,
    UnsupportedByEngine,
)
from controlplane.core.layout import Layout
from controlplane.core.sampling import SamplingSettings
from controlplane.device_memory.ranges import ExportedProbe
from engine_agent.engine import (
    PROCESSED_LOGPROBS,
    EngineFacts,
    GenerationDelta,
    InstallReport,
    LiveRequests,
    StagedPart,
    StagedWeights,
)
from engine_agent.external.attaching import ServerFacts, Unfit, devices_of, read_facts, take, wait_for_server
from engine_agent.external.ipc import IpcInstaller, TensorHandle
from engine_agent.external.server import Server, ServerRefused
from engine_agent.external.settings import ExternalSettings
from engine_agent.external.streams import Streams, prompt_scores, request_body, spoken_logprobs
from engine_agent.vllm.canary import DECODED_TOKENS, FIRST, CanarySilent, canary_prompt, judge
from engine_agent.vllm.checkpoint import CheckpointError, ModelFacts, expected_of, read_checkpoint, read_model_facts
from engine_agent.vllm.install import MIXTURE, Installer

__all__ = ["ExternalEngine", "ExternalSettings"]

T = TypeVar("T")

POLL_SECONDS = 0.002
"""Between looks at whether the last tokens came."""

_numbers = itertools.count(1)


class ExternalEngine:
    """One life at one server. Used from one event loop."""

    def __init__(self, settings: ExternalSettings, engine_id: str) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._server_or_none: Server | None = None
        self._streams_or_none: Streams | None = None
        self._installer_or_none: Installer | None = None
        self._facts: EngineFacts | None = None
        self._keeps = False
        self._coming = ""
        """The label of a streaming install under way."""

    # ---- life -------------------------------------------------------------------------------

    async def start(self) -> EngineFacts:
        if self._server_or_none is not None:
            raise EngineDied(self._engine_id, "an engine has one life; make a new one")
        try:
            tensors = await asyncio.to_thread(read_checkpoint, self._settings.model)
            model = read_model_facts(self._settings.model, tensors)
        except CheckpointError as error:
            raise EngineDied(self._engine_id, str(error)) from error
        server = self._server_or_none = Server(self._settings.url, self._engine_id, self._on_death)
        try:
            await wait_for_server(self._settings, self._engine_id)
            found = await self._ask(read_facts(server, self._settings), "what the server is")
            server.world_size, self._keeps = found.world_size, found.keeps
            self._streams_or_none = Streams(server, server.llm.receipts.label_of, tokenizer=found.tokenizer)
            uuids = await self._ask(devices_of(server, self._settings), "the workers' devices")
            expected = expected_of(tensors, model, found.dtype)
            kind = IpcInstaller if self._settings.transfer == "ipc" else Installer
            self._installer_or_none = kind(server, uuids, expected, self._settings.install_timeout_seconds)
            await self._ask(take(server, self._settings), "attaching")
            await self._installer.close_session()
        except (Unfit, ServerRefused, DeadlineExceeded) as error:
            raise server.died(f"the server at {self._settings.url}: {error}") from error
        self._facts = self._facts_of(found, model, uuids)
        return self._facts

    def _facts_of(self, found: ServerFacts, model: ModelFacts, uuids: tuple[str, ...]) -> EngineFacts:
        more = {"prefix_cache": found.prefix_cache}
        able = {"staged", "rollback", STREAMING} if self._settings.transfer == "weightplane" else set()
        able.add(PROCESSED_LOGPROBS)  # another server is not attached to
        return EngineFacts(
            world_size=found.world_size,
            device_uuids=uuids,
            vocab_size=model.vocab_size,
            max_model_len=found.max_model_len,
            max_logprobs=found.max_logprobs,
            likeness=found.likeness,
            max_requests=found.max_num_seqs - 1,  # one place is the canary's
            expected=self._installer.expected,
            capabilities=frozenset(able | {name for name, there in more.items() if there}),
            pids=(),  # its processes are not this agent's
        )

    async def probe(self) -> None:
        limit = self._settings.install_timeout_seconds + self._settings.call_timeout_seconds
        await self._ask(self._server.llm.check_label(), "probe", limit)

    async def shutdown(self) -> None:
        """The server stays, paused: nobody says any more what it serves. One that is gone or another's is let be."""
        server, self._server_or_none = self._server_or_none, None
        if server is None:
            return
        try:
            if not server.dead and self._facts is not None:
                await server.ask(server.llm.pause("abort"), "pause", self._settings.shutdown_timeout_seconds)
        except (EngineDied, DeadlineExceeded, ServerRefused):
            pass
        finally:
            server.died("its agent ended")
            await server.close()

    async def sleep(self, level: int) -> None:
        raise UnsupportedByEngine(self._engine_id, "sleep")

    async def wake(self, *, kv_cache: bool) -> None:
        raise UnsupportedByEngine(self._engine_id, "sleep")

    # ---- tokens -----------------------------------------------------------------------------

    def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingSettings
    ) -> AsyncGenerator[GenerationDelta, None]:
        return self._streams.run(request_id, prompt_token_ids, sampling, self._salt)

    async def quiesce(self) -> LiveRequests:
        """Where the server cannot tell which tokens are out, requests are ended instead of kept: then all came."""
        llm = self._server.llm
        await self._ask(llm.pause("keep" if self._keeps else "abort"), "quiesce")
        handed_over = self._handed_over() if self._keeps else self._ended()
        await self._ask(handed_over, "hand-over of the last tokens")
        return LiveRequests(self._streams.counts())

    async def _handed_over(self) -> None:
        while not self._streams.agree(await self._server.llm.live()):  # noqa: ASYNC110 - HTTP has no event for it
            await asyncio.sleep(POLL_SECONDS)

    async def _ended(self) -> None:
        while len(self._streams):
            await self._server.llm.abort_all()  # once more for those that were on their way
            await asyncio.sleep(POLL_SECONDS)

    async def resume(self) -> None:
        await self._ask(self._server.llm.resume(), "resume")

    # ---- weights ----------------------------------------------------------------------------

    async def install(self, staged: StagedWeights) -> InstallReport:
        return await self._in_time(lambda: self._sealed(self._installer.install(staged)), staged.label)

    async def begin_streaming(self, layout: Layout, label: str) -> None:
        self._coming = label
        await self._in_time(lambda: self._installer.begin_streaming(layout, label), label)

    async def open_exports(self, probes: Sequence[ExportedProbe]) -> None:
        """Its workers may know nothing of this package. That none is open is true."""
        if probes:
            cause = "a server that somebody else started opens none"
            raise IpcNotPossible(self._engine_id, probes[0].range.device_uuid, cause)

    async def install_part(self, part: StagedPart) -> None:
        await self._in_time(lambda: self._installer.install_part(part), self._coming)

    async def install_handles(self, handles: Sequence[TensorHandle]) -> None:
        """As `install_part`, of tensors in device memory. Raises UnsupportedByEngine: the server does not take them."""
        installer = self._installer
        if not isinstance(installer, IpcInstaller):
            raise UnsupportedByEngine(self._engine_id, "receive handles of device memory")
        await self._in_time(lambda: installer.install_handles(handles), self._coming)

    async def finish_streaming(self) -> InstallReport:
        return await self._in_time(lambda: self._sealed(self._installer.finish_streaming()), self._coming)

    async def abandon_streaming(self) -> None:
        await self._in_time(self._installer.abandon_streaming, self._coming)

    async def _sealed(self, install: Awaitable[InstallReport]) -> InstallReport:
        """An install is done when the label of this very install was read back."""
        report = await install
        await self._server.llm.check_label()
        return report

    async def _in_time(self, work: Callable[[], Awaitable[T]], label: str) -> T:
        """Raises InstallTimedOut, with this life over: what the server holds nobody knows (INV-4)."""
        limit, server = self._settings.install_timeout_seconds, self._server
        try:
            async with asyncio.timeout(limit):
                return await work()
        except (TimeoutError, DeadlineExceeded) as late:
            server.died(f"the install of {label} did not end within {limit} s, and may still be running")
            raise InstallTimedOut(self._engine_id, label, limit) from late
        except ServerRefused as refused:  # also the way back was refused
            raise server.died(f"the install of {label} ended unknown: {refused}") from refused
        except asyncio.CancelledError:
            server.died(f"the install of {label} was broken off, and may still be running")
            raise
        except InstallFailed as failed:
            if failed.touched and self._settings.transfer == "ipc":  # no later update is known to heal it
                raise server.died(f"{failed.cause}; the server must be started anew") from failed
            raise

    async def clear_caches(self) -> None:
        try:
            cleared = await self._installer.clear_caches()
        except ServerRefused as refused:
            raise self._server.died(str(refused)) from refused
        if not cleared:
            raise self._server.died("it did not clear its prefix cache while it stood still")

    async def canary(self, prompt: Sequence[int] | None = None) -> Canary:
        facts, server = self._started_facts, self._server
        prompt = list(prompt or canary_prompt(facts.vocab_size, facts.max_model_len))
        decoded = min(DECODED_TOKENS, facts.max_model_len - len(prompt))
        try:
            return await self._ask(self._speak(prompt, decoded), "canary", self._settings.canary_timeout_seconds)
        except (CanarySilent, DeadlineExceeded, InvalidRequest, RequestAborted) as error:
            self._installer.kv_suspect = True
            label = server.llm.receipts.label_of(self._salt)
            raise CanaryFailed(self._engine_id, label, str(error)) from error
        finally:
            if not server.dead:
                await self.quiesce()

    async def _speak(self, prompt: list[int], decoded: int) -> Canary:
        """The request is in the server's queue before the scheduler runs, else kept requests would take every place."""
        llm = self._server.llm
        if len(self._streams):
            await llm.reset_prefix_cache(reset_running_requests=True)
        name = f"weightplane-canary-{next(_numbers)}"
        sampling = SamplingSettings(
            max_tokens=decoded, temperature=0.0, ignore_eos=True, prompt_logprobs=True, priority=FIRST
        )
        reply = asyncio.ensure_future(self._streams.ask(request_body(name, prompt, sampling, name)))
        try:
            while self._keeps and not reply.done() and name not in await llm.live():  # noqa: ASYNC110 - HTTP has no event
                await asyncio.sleep(POLL_SECONDS)
            await llm.resume()
            answer = await reply
        finally:
            reply.cancel()
        (choice,) = answer["choices"]
        return judge(choice["token_ids"], spoken_logprobs(choice), prompt_scores(answer, prompt), prompt, decoded)

    # ---- parts ------------------------------------------------------------------------------

    async def _ask(self, call: Awaitable[T], what: str, limit: float | None = None) -> T:
        """Raises EngineDied, DeadlineExceeded. A server that refuses one of these can do nothing any more."""
        server = self._server
        try:
            return await server.ask(call, what, limit or self._settings.call_timeout_seconds)
        except ServerRefused as refused:
            raise server.died(f"{what}: {refused}") from refused

    def _on_death(self, error: EngineDied) -> None:
        if self._streams_or_none is not None:
            self._streams_or_none.fail(error)

    @property
    def _salt(self) -> str:
        """Keeps prefixes of different installs apart even if a cache were not cleared."""
        return self._server.llm.receipts.present or MIXTURE

    @property
    def _server(self) -> Server:
        if self._server_or_none is None:
            raise EngineDied(self._engine_id, "it is not running")
        return self._server_or_none

    @property
    def _streams(self) -> Streams:
        if self._streams_or_none is None:
            raise EngineDied(self._engine_id, "it is not running")
        return self._streams_or_none

    @property
    def _installer(self) -> Installer:
        if self._installer_or_none is None:
            raise EngineNotReady(self._engine_id, "it is not started")
        return self._installer_or_none

    @property
    def _started_facts(self) -> EngineFacts:
        if self._facts is None:
            raise EngineNotReady(self._engine_id, "it is not started")
        return self._facts

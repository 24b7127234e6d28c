"""An engine in memory: no model, no processes, the same port and the same manners as the real one.

For tests and for scale. It really reads the staged bytes (so a receiver that hands out wrong ones is caught), keeps
their digest as its weights, and makes tokens that are a pure function of weights, prompt and position:
whoever knows the weights can recompute them. It accounts for its device's memory: what is not resident can neither be
written nor stepped with, and dies of it as a real one would.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import struct
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from controlplane import failpoints
from controlplane.core.canary import Canary
from controlplane.core.engine_core import DROPS_WEIGHTS, SLEEP
from controlplane.core.engine_streaming import STREAMING
from controlplane.core.errors import (
    CanaryFailed,
    EngineDied,
    InstallFailed,
    InvalidRequest,
    IpcNotPossible,
    UnsupportedByEngine,
)
from controlplane.core.layout import (
    Layout,
    TargetKind,
    content_digest,
    own_name,
)
from controlplane.core.names import device_uuid
from controlplane.core.routed_experts import RoutedExperts
from controlplane.core.sampling import SamplingSettings
from controlplane.device_memory.ranges import ExportedProbe
from engine_agent.engine import (
    DRAFT,
    DRAFT_IS_A_MIXTURE,
    PROCESSED_LOGPROBS,
    ROUTED_EXPERTS,
    SAMPLING_MASK,
    EngineFacts,
    GenerationDelta,
    InstallReport,
    LiveRequests,
    StagedPart,
    StagedWeights,
)
from engine_agent.memory.model import (
    MemorySettings,
    digest_of,
    expected_of,
    expert_of,
    initial_tensors,
    score_of,
    sizes_of,
    token_of,
    weights_of,
)

__all__ = ["MemoryEngine", "MemorySettings", "initial_tensors", "score_of", "token_of", "weights_of"]

CANARY_PROMPT = (1, 2, 3, 4)
CANARY_TOKENS = 4


@dataclass
class _Live:
    seen: int = 0
    spans: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass
class _Streaming:
    """An install whose bytes come in parts."""

    layout: Layout
    label: str
    began: float
    fresh: dict[str, bytes] = field(default_factory=dict)


class MemoryEngine:
    """See `engine_agent.engine.Engine`."""

    def __init__(self, settings: MemorySettings, engine_id: str, *, serve_initial: bool = False) -> None:
        """`serve_initial`: it serves the weights that it loads, as number 0."""
        self._settings = settings
        self._engine_id = engine_id
        self._weights, self._digest, self._label = hashlib.sha256(b"initial").digest(), b"", "default"
        self._draft = self._weights
        self._draft_whole = True
        if serve_initial:
            initial = initial_tensors(settings)
            self._weights = weights_of({name: hashlib.sha256(data).digest() for name, data in initial.items()})
            self._digest = content_digest([xxhash.xxh3_64_digest(initial[name]) for name in sorted(initial)])
            self._label = "0"
        self._resident = {"weights": sum(sizes_of(settings).values()), "kv": settings.kv_bytes}
        self._asleep: dict[str, int] = {}
        """What is not on the device now, and its size."""
        self._death = ""
        self.cleared = 0
        """How often its caches were cleared by a command."""
        self._streaming: _Streaming | None = None
        self._live: dict[str, _Live] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._stepping = 0
        self._still = asyncio.Event()
        self._still.set()

    @property
    def device_bytes(self) -> int:
        """What it holds of its device's memory now."""
        return sum(self._resident.values())

    @property
    def resident(self) -> frozenset[str]:
        """What lies in its device's memory now, of `weights` and `kv`."""
        return frozenset(self._resident)

    @property
    def draft_weights(self) -> bytes:
        """Its draft model's weights as one digest, as `weights_of` makes it."""
        return self._draft

    async def start(self) -> EngineFacts:
        return EngineFacts(
            world_size=len(self._settings.device_uuids),
            device_uuids=tuple(device_uuid(d) for d in self._settings.device_uuids),
            vocab_size=self._settings.vocab_size,
            max_model_len=self._settings.max_model_len,
            max_logprobs=0,
            likeness=f"memory, vocabulary {self._settings.vocab_size}",
            max_requests=self._settings.max_requests,
            expected=expected_of(self._settings),
            capabilities=self._capabilities(),
            pids=(os.getpid(),),
            initial_digest=self._digest or None,
        )

    def _capabilities(self) -> frozenset[str]:
        drafted = bool(self._settings.draft_tensors)
        more = {
            SLEEP: self._settings.can_sleep,
            STREAMING: self._settings.can_stream and not drafted,
            DRAFT: drafted,
            ROUTED_EXPERTS: self._settings.expert_layers > 0,
            SAMPLING_MASK: self._settings.says_masks,
        }
        return frozenset({"staged", "rollback", PROCESSED_LOGPROBS, *(name for name, able in more.items() if able)})

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingSettings
    ) -> AsyncGenerator[GenerationDelta, None]:
        for name in sampling.extra:
            raise InvalidRequest(f"sampling.extra.{name}", "an in-memory engine has no such field")
        live = self._live[request_id] = _Live()
        try:
            for position in range(sampling.max_tokens):
                await self._running.wait()
                token = await self._step(live, prompt_token_ids, position)
                last = position + 1 == sampling.max_tokens
                stopped = token in sampling.stop_token_ids
                yield GenerationDelta(
                    (token,),
                    () if sampling.logprobs is None else (self._logprob(token),),
                    finish_reason="stop" if stopped else "length" if last else None,
                    stop_reason=str(token) if stopped else "",
                    prompt_logprobs=self._scores(prompt_token_ids, sampling) if not position else (),
                    engine_spans=tuple(live.spans) if stopped or last else (),
                    sampling_masks=((token,),) if self._settings.says_masks else (),
                    routed_experts=self._routed(len(prompt_token_ids) + position) if stopped or last else None,
                )
                if stopped:
                    return
        finally:
            del self._live[request_id]

    async def _step(self, live: _Live, prompt: Sequence[int], position: int) -> int:
        """One token. While any step runs the engine does not stand still."""
        self._stepping += 1
        self._still.clear()
        try:
            await asyncio.sleep(self._settings.seconds_per_token)
            self._need("weights", "kv", what="a step")
            token = token_of(self._weights, prompt, position, self._settings.vocab_size)
            live.seen += 1
            if live.spans and live.spans[-1][0] == self._label:
                live.spans[-1] = (self._label, live.spans[-1][1], position + 1)
            else:
                live.spans.append((self._label, position, position + 1))
            return token
        finally:
            self._stepping -= 1
            if not self._stepping:
                self._still.set()

    def _routed(self, tokens: int) -> RoutedExperts | None:
        layers = self._settings.expert_layers
        if not layers:
            return None
        experts = [expert_of(token, layer) for token in range(tokens) for layer in range(layers)]
        return RoutedExperts(0, layers, 1, struct.pack(f"<{len(experts)}H", *experts))

    def _scores(self, prompt: Sequence[int], sampling: SamplingSettings) -> tuple[float, ...]:
        if not sampling.prompt_logprobs:
            return ()
        return tuple(score_of(self._weights, prompt, i) for i in range(1, len(prompt)))

    def _logprob(self, token: int) -> float:
        return -math.log(self._settings.vocab_size) - token / (1000.0 * self._settings.vocab_size)

    async def quiesce(self) -> LiveRequests:
        self._running.clear()
        await self._still.wait()
        await asyncio.sleep(0)  # the consumer of a token made in the last step has it after one turn of the loop
        return LiveRequests({request_id: live.seen for request_id, live in self._live.items()})

    def _check_still(self, label: str) -> None:
        if self._running.is_set():
            raise InstallFailed(self._engine_id, label, False, "the engine was not quiesced")
        if "weights" not in self._resident:
            raise InstallFailed(self._engine_id, label, False, "the weights are not resident")

    async def install(self, staged: StagedWeights) -> InstallReport:
        self._check_still(staged.label)
        drafted = staged.layout.draft is not None
        if not drafted and not self._draft_whole:
            raise InstallFailed(self._engine_id, staged.label, False, DRAFT_IS_A_MIXTURE)
        began = time.monotonic()
        await asyncio.sleep(self._settings.install_seconds)
        fresh: dict[str, bytes] = {}
        for index, tensor in enumerate(staged.layout.tensors):
            try:
                failpoints.hit("worker.install", index)
                fresh[tensor.name] = digest_of(staged.chunks, staged.placements[index], tensor)
            except (failpoints.Injected, OSError) as error:
                self._weights = hashlib.sha256(b"mixture").digest()
                self._draft, self._draft_whole = (self._weights, False) if drafted else (self._draft, True)
                raise InstallFailed(self._engine_id, staged.label, True, str(error)) from error
        self._put_in_place(staged.layout, fresh)
        self._label = staged.label
        return InstallReport(len(fresh), time.monotonic() - began, 0.0)

    def _put_in_place(self, layout: Layout, fresh: Mapping[str, bytes]) -> None:
        """Model and draft in one step, each under its own names."""
        self._weights = weights_of({t.name: fresh[t.name] for t in layout.tensors if t.is_for(TargetKind.MODEL)})
        if layout.draft is not None:
            drafted = [t.name for t in layout.tensors if t.is_for(TargetKind.DRAFT)]
            self._draft, self._draft_whole = weights_of({own_name(n): fresh[n] for n in drafted}), True

    async def open_exports(self, probes: Sequence[ExportedProbe]) -> None:
        """It has no device. That none is open is true."""
        if probes:
            raise IpcNotPossible(self._engine_id, probes[0].range.device_uuid, "an in-memory engine opens none")

    async def begin_streaming(self, layout: Layout, label: str) -> None:
        if not self._settings.can_stream:
            raise UnsupportedByEngine(engine_id=self._engine_id, what="streaming installs")
        self._check_still(label)
        self._streaming = _Streaming(layout, label, time.monotonic())

    async def install_part(self, part: StagedPart) -> None:
        streaming = self._under_way()
        self._weights = hashlib.sha256(b"mixture").digest()
        for tensor, place in zip(part.tensors, part.placements, strict=True):
            spec = streaming.layout.tensors[tensor]
            try:
                failpoints.hit("worker.install", len(streaming.fresh))
                streaming.fresh[spec.name] = digest_of(part.chunks, place, spec)
            except (failpoints.Injected, OSError) as error:
                raise InstallFailed(self._engine_id, streaming.label, True, str(error)) from error

    async def finish_streaming(self) -> InstallReport:
        streaming = self._under_way()
        await asyncio.sleep(self._settings.install_seconds)
        missing = [t.name for t in streaming.layout.tensors if t.name not in streaming.fresh]
        if missing:
            raise InstallFailed(self._engine_id, streaming.label, True, f"{missing[0]} did not come")
        self._weights, self._label, self._streaming = weights_of(streaming.fresh), streaming.label, None
        return InstallReport(len(streaming.fresh), time.monotonic() - streaming.began, 0.0)

    async def abandon_streaming(self) -> None:
        self._streaming = None

    def _under_way(self) -> _Streaming:
        if self._streaming is None:
            raise InstallFailed(self._engine_id, "", False, "no streaming install was begun")
        self._check_still(self._streaming.label)
        return self._streaming

    async def clear_caches(self) -> None:
        if self._running.is_set():
            self._death = "its caches were cleared while it was stepping"
        self._need("kv", what="a cache")
        self.cleared += 1

    async def canary(self, prompt: Sequence[int] | None = None) -> Canary:
        self._need("weights", "kv", what="a canary")
        said, vocab = tuple(prompt or CANARY_PROMPT), self._settings.vocab_size
        tokens = tuple(token_of(self._weights, said, i, vocab) for i in range(CANARY_TOKENS))
        logprobs = tuple(score_of(self._weights, said, i) for i in range(1, len(said)))
        if not all(math.isfinite(p) for p in logprobs):
            raise CanaryFailed(self._engine_id, self._label, "a logprob is not finite")
        return Canary(logprobs, tokens)

    async def resume(self) -> None:
        self._need("weights", "kv", what="a scheduler")
        self._running.set()

    async def sleep(self, level: int) -> None:
        if self._running.is_set() or self._stepping:
            self._death = "it was put to sleep while it was stepping"
            raise EngineDied(self._engine_id, self._death)
        await asyncio.sleep(self._settings.sleep_seconds)
        self._asleep |= self._resident
        self._resident = {}
        if level == DROPS_WEIGHTS:  # what is in that memory after waking is anybody's
            self._weights = hashlib.sha256(b"dropped").digest()
            self._draft, self._draft_whole = self._weights, not self._settings.draft_tensors

    async def wake(self, *, kv_cache: bool) -> None:
        await asyncio.sleep(self._settings.sleep_seconds)
        for name in ("weights", "kv") if kv_cache else ("weights",):
            if name in self._asleep:
                self._resident[name] = self._asleep.pop(name)

    def _need(self, *names: str, what: str) -> None:
        """A real one reads unmapped memory and dies."""
        missing = [name for name in names if name not in self._resident]
        if missing:
            self._death = f"{what} needs {' and '.join(missing)}, not resident"
        if self._death:
            raise EngineDied(self._engine_id, self._death)

    async def probe(self) -> None:
        await asyncio.sleep(0)
        if self._death:
            raise EngineDied(self._engine_id, self._death)

    async def shutdown(self) -> None:
        self._running.clear()

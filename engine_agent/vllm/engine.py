"""The engine port over vLLM's AsyncLLM, in the agent's process; EngineCore and workers are processes of their own.

Promises what `engine_agent.engine.Engine` says. Every wait has a limit and ends with the engine's death. Weights
change only in `install`, and from `begin_streaming` to its end, which need a quiesced engine; a request made by a
caller never changes the label.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from controlplane.core.canary import Canary
from controlplane.core.engine_sleep import SLEEP
from controlplane.core.errors import (
    CanaryFailed,
    DeadlineExceeded,
    EngineDied,
    EngineNotReady,
    InstallFailed,
    InstallTimedOut,
    PeerLost,
    UnsupportedByEngine,
)
from controlplane.core.layout import Layout
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import FROZEN
from controlplane.device_memory.ranges import ExportedProbe
from controlplane.tensor_files import StoredTensor
from engine_agent.engine import (
    EngineFacts,
    GenerationDelta,
    InstallReport,
    LiveRequests,
    StagedPart,
    StagedWeights,
)
from engine_agent.threads import in_thread
from engine_agent.vllm.calls import Core
from engine_agent.vllm.canary import DECODED_TOKENS, CanarySilent, canary_prompt, speak
from engine_agent.vllm.checkpoint import CheckpointError, digest_of, expected_of, read_checkpoint, read_model_facts
from engine_agent.vllm.engine_log import EngineLog
from engine_agent.vllm.environment import gpu_present
from engine_agent.vllm.exports import open_exports
from engine_agent.vllm.facts import draft_of, dtype_name, facts_of
from engine_agent.vllm.further_nodes import FurtherNodes
from engine_agent.vllm.install import MIXTURE, Installer
from engine_agent.vllm.launch import end, launch
from engine_agent.vllm.leftovers import Leftovers
from engine_agent.vllm.power import Power, can_sleep
from engine_agent.vllm.processes import descendants, kill, own_segments, processes_of, remove
from engine_agent.vllm.settings import VllmSettings
from engine_agent.vllm.streams import Streams

__all__ = ["VllmEngine", "VllmSettings"]

T = TypeVar("T")

DRAIN_POLL_SECONDS = 0.0005
"""Between looks at whether the last tokens reached their consumers; far below one decoding step."""


class VllmEngine:
    """One vLLM engine, one life. Used from one event loop."""

    def __init__(
        self,
        settings: VllmSettings,
        engine_id: str,
        *,
        serve_initial: bool = False,
        note: Path | None = None,
        further: FurtherNodes | None = None,
    ) -> None:
        """`serve_initial`: it serves the model directory as it is, as number 0. `note`: file in which its processes are
        written down while they live, for the next start to sweep. `further`: its other nodes."""
        self._leftovers = Leftovers(note) if note is not None else None
        self._settings = settings
        self._further = further
        self._engine_id = engine_id
        self._serve_initial = serve_initial
        self._log: EngineLog | None = None
        self._core_or_none: Core | None = None
        self._installer_or_none: Installer | None = None
        self._power_or_none: Power | None = None
        self._processes: list[psutil.Process] = []
        self._segments: set[Path] = set()
        self._streams = Streams()
        self._facts: EngineFacts | None = None
        self._label = ""
        self._coming = ""
        """The label of a streaming install under way."""

    # ---- life -------------------------------------------------------------------------------

    async def start(self) -> EngineFacts:
        if self._log is not None:
            raise EngineDied(self._engine_id, "an engine has one life; make a new one")
        self._log = EngineLog(self._settings.log_level)
        if self._settings.batch_invariant and not gpu_present():
            raise UnsupportedByEngine(self._engine_id, "batch_invariant: vLLM has it on GPUs alone")
        if self._leftovers is not None:
            await asyncio.to_thread(self._leftovers.sweep)
        try:
            tensors = await asyncio.to_thread(read_checkpoint, self._settings.model)
            model = read_model_facts(self._settings.model, tensors)
        except CheckpointError as e:
            raise EngineDied(self._engine_id, str(e)) from e
        llm = await self._launch(self._log)
        core = self._core_or_none = Core(llm, self._engine_id, self._log, self._streams.fail)
        self._streams.attach(llm)
        if self._further is not None:
            self._further.watch(core.died)
        try:
            workers = await self._meet_workers(core)
        except DeadlineExceeded as e:
            raise core.died(str(e)) from e
        drafted = await asyncio.to_thread(draft_of, llm, self._settings.model, self._engine_id)
        expected = replace(expected_of(tensors, model, dtype_name(llm.vllm_config.model_config.dtype)), draft=drafted)
        initial_digest = await self._name_initial(core, tensors) if self._serve_initial else None
        limits = self._settings
        self._facts = facts_of(
            *(core, workers, expected, initial_digest),
            device_uuids=limits.device_uuids,
            pids=tuple(p.pid for p in self._processes),
            alone=self._further is None,
        )
        self._installer_or_none = Installer(core, self._facts.device_uuids, expected, limits.install_timeout_seconds)
        if can_sleep(llm):
            self._power_or_none = Power(core, self._installer, limits.call_timeout_seconds)
        return self._facts

    async def _launch(self, log: EngineLog) -> Any:
        try:
            nodes = None if self._further is None else await self._further.meet()
        except (DeadlineExceeded, PeerLost) as e:
            raise EngineDied(self._engine_id, str(e)) from e
        return await launch(self._settings, self._engine_id, log, self._note, nodes)

    async def _name_initial(self, core: Core, tensors: Mapping[str, StoredTensor]) -> bytes:
        """What it loaded, summed from the same files; tokens are stamped with its number from here on (INV-11)."""
        try:
            digest = await asyncio.to_thread(digest_of, tensors)
            label = FROZEN.label
            await core.ask(core.llm.update_weight_version(label), "label", self._settings.call_timeout_seconds)
        except (CheckpointError, DeadlineExceeded) as e:
            raise EngineDied(self._engine_id, str(e)) from e
        self._label = label
        return digest

    async def sleep(self, level: int) -> None:
        await self._power.sleep(level)

    async def wake(self, *, kv_cache: bool) -> None:
        await self._power.wake(kv_cache=kv_cache)

    async def probe(self) -> None:
        if self._log is not None:
            self._log.trim()
        limit = self._settings.install_timeout_seconds + self._settings.call_timeout_seconds
        await self._core.ask(self._core.llm.is_paused(), "probe", limit)

    async def shutdown(self) -> None:
        core, self._core_or_none = self._core_or_none, None
        if core is not None:
            core.close()
            core.died("it was shut down", explain=False)
            await end(core.llm, self._settings.shutdown_timeout_seconds)
        if self._further is not None:
            self._further.release()
        await self._kill()
        remove(self._segments)
        if self._leftovers is not None:
            self._leftovers.clear()
        if self._log is not None:
            self._log.remove()

    # ---- tokens -----------------------------------------------------------------------------

    def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingSettings
    ) -> AsyncGenerator[GenerationDelta, None]:
        # the salt keeps prefixes of different versions apart even if a cache were not cleared
        return self._streams.run(self._core, request_id, prompt_token_ids, sampling, self._label)

    def generate_native(
        self, request_id: str, prompt: Mapping[str, Any], params: Any, how: Mapping[str, Any]
    ) -> AsyncGenerator[GenerationDelta, None]:
        """The same in vLLM's own words, for its API app. `how`: further arguments of its `add_request`."""
        return self._streams.run_native(self._core, request_id, prompt, params, self._label, how)

    @property
    def llm(self) -> Any:
        """vLLM's object, to read from: configuration, tokenizer, tasks. Raises EngineDied."""
        return self._core.llm

    async def quiesce(self) -> LiveRequests:
        core = self._core
        limit = self._settings.call_timeout_seconds
        stop = core.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await core.ask(stop, "quiesce", limit)
        # The core answers on the socket of its outputs, after the last of them: what is left is in this process.
        await core.ask(self._drained(), "hand-over of the last tokens", limit)
        return LiveRequests(self._streams.counts())

    async def resume(self) -> None:
        await self._core.ask(self._core.llm.resume_generation(), "resume", self._settings.call_timeout_seconds)

    # ---- weights ----------------------------------------------------------------------------

    async def install(self, staged: StagedWeights) -> InstallReport:
        report = await self._in_time(self._install_everywhere(staged), staged.label)
        self._label = staged.label
        return report

    async def open_exports(self, probes: Sequence[ExportedProbe]) -> None:
        limit = self._settings.call_timeout_seconds
        await open_exports(self._core, self._started_facts.device_uuids, probes, limit)

    async def begin_streaming(self, layout: Layout, label: str) -> None:
        self._coming = label
        await self._in_time(self._installer.begin_streaming(layout, label), label)

    async def install_part(self, part: StagedPart) -> None:
        await self._in_time(self._installer.install_part(part), self._coming)

    async def finish_streaming(self) -> InstallReport:
        report = await self._in_time(self._installer.finish_streaming(), self._coming)
        self._label = self._coming
        return report

    async def abandon_streaming(self) -> None:
        self._label = MIXTURE if self._installer.streaming else self._label
        await self._in_time(self._installer.abandon_streaming(), self._coming)

    async def _in_time(self, work: Awaitable[T], label: str) -> T:
        """Raises InstallTimedOut, with the engine killed; else what the work raises."""
        limit = self._settings.install_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                return await work
        except InstallFailed as e:
            self._label = MIXTURE if e.touched else self._label
            raise
        except (TimeoutError, DeadlineExceeded) as e:
            await self._kill()  # INV-4: what the workers hold now nobody knows
            raise InstallTimedOut(self._engine_id, label, limit) from e
        except asyncio.CancelledError:
            await asyncio.shield(self._kill())
            raise

    async def _install_everywhere(self, staged: StagedWeights) -> InstallReport:
        installer = self._installer
        if self._further is None:
            return await installer.install(staged)
        async with self._further.holding(staged, self._started_facts.device_uuids) as on_every_node:
            return await installer.install(on_every_node)

    async def clear_caches(self) -> None:
        if not await self._installer.clear_caches():
            raise self._core.died("it did not clear its prefix cache while it stood still")

    async def canary(self, prompt: Sequence[int] | None = None) -> Canary:
        core, limit = self._core, self._settings.canary_timeout_seconds
        facts = self._started_facts
        prompt = list(prompt or canary_prompt(facts.vocab_size, facts.max_model_len))
        if len(self._streams):  # requests that run already would keep their places in the batch
            await core.ask(core.llm.reset_prefix_cache(reset_running_requests=True), "canary", limit)
        decoded = min(DECODED_TOKENS, facts.max_model_len - len(prompt))
        try:
            return await core.ask(speak(core.llm, prompt, decoded, self.resume, core.cores), "canary", limit)
        except (CanarySilent, DeadlineExceeded) as e:
            self._installer.kv_suspect = True
            raise CanaryFailed(self._engine_id, self._label or "unset", str(e)) from e
        finally:
            if core.death is None:
                await self.quiesce()

    # ---- parts ------------------------------------------------------------------------------

    @property
    def _core(self) -> Core:
        if self._core_or_none is None:
            raise EngineDied(self._engine_id, "it is not running")
        return self._core_or_none

    @property
    def _installer(self) -> Installer:
        if self._installer_or_none is None:
            raise EngineNotReady(self._engine_id, "it is not started")
        return self._installer_or_none

    @property
    def _power(self) -> Power:
        if self._power_or_none is None:
            raise UnsupportedByEngine(self._engine_id, SLEEP)
        return self._power_or_none

    @property
    def _started_facts(self) -> EngineFacts:
        if self._facts is None:
            raise EngineNotReady(self._engine_id, "it is not started")
        return self._facts

    async def _meet_workers(self, core: Core) -> list[dict[str, Any]]:
        limit = self._settings.call_timeout_seconds
        await core.ask(core.llm.get_supported_tasks(), "get_supported_tasks", limit)  # vLLM's tasks begin on this loop
        workers = await core.collect("weightplane_facts", limit)
        here = len(workers) // (1 + self._settings.further_nodes)  # pids of other nodes are strangers' here
        self._processes = processes_of(sorted(_pids(workers[:here])))
        self._segments = own_segments(self._processes)
        self._note(descendants())
        return workers

    def _note(self, processes: set[psutil.Process]) -> None:
        if self._leftovers is not None:
            self._leftovers.note(processes)

    async def _drained(self) -> None:
        while not self._streams.drained:  # noqa: ASYNC110 - vLLM's queues have no event for it
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def _kill(self) -> None:
        await in_thread(lambda: kill(self._processes), name="weightplane-vllm-kill")


def _pids(workers: Sequence[dict[str, Any]]) -> set[int]:
    """Of the cores and workers; never this process's own, whatever a worker thinks its parent is."""
    return {w[key] for w in workers for key in ("pid", "core_pid")} - {0, 1, os.getpid()}

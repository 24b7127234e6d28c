"""Sleep and waking of vLLM's workers, with the scheduler standing still all the while.

vLLM's own `wake_up` starts the scheduler, on whatever weights there are; here the workers alone are told, all of every
core, and the gate alone starts the scheduler. Promises: what requests had computed is forgotten before the KV cache
goes, and its memory holds zeros before anybody reads it again; an engine that sleeps already is not told again, nor is
one that is awake.
"""

from __future__ import annotations

from typing import Any

from engine_agent.vllm.calls import Core
from engine_agent.vllm.install import Installer

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's tags of device memory. What it keeps under others it takes again with either."""


def can_sleep(llm: Any) -> bool:
    """Where the platform has it, and `vllm_arguments` asked for it (`enable_sleep_mode`): it costs an allocator of its
    own."""
    from vllm.platforms import current_platform

    enabled = bool(llm.vllm_config.model_config.enable_sleep_mode)
    return enabled and bool(current_platform.is_sleep_mode_available())


class Power:
    """Of one engine."""

    def __init__(self, core: Core, installer: Installer, limit_seconds: float) -> None:
        self._core = core
        self._installer = installer
        self._limit = limit_seconds
        self._asleep: frozenset[str] = frozenset()

    async def sleep(self, level: int) -> None:
        """Must be called quiesced. Level 2 of an engine that sleeps at level 1 leaves the copy in host memory, which a
        wake brings back: they are nobody's weights all the same.

        Raises EngineDied, DeadlineExceeded, and what a worker's failure is to vLLM: its memory is in an unknown state.
        """
        if not self._asleep:
            if not await self._installer.clear_caches():
                raise self._core.died("it did not clear its prefix cache before it slept")
            await self._core.tell("sleep", self._limit, level=level)
        elif WEIGHTS not in self._asleep:
            await self._core.tell("sleep", self._limit, level=level)
        self._asleep, self._installer.kv_resident = frozenset({WEIGHTS, KV_CACHE}), False

    async def wake(self, *, kv_cache: bool) -> None:
        """The scheduler stands still as before. Raises as `sleep` does."""
        wanted = {WEIGHTS, KV_CACHE} if kv_cache else {WEIGHTS}
        tags = sorted(wanted & self._asleep)
        if not tags:
            return
        await self._core.tell("wake_up", self._limit, tags=tags)
        self._asleep -= wanted
        if KV_CACHE in tags:  # memory that was anybody's: a NaN in it would be met by later requests
            self._installer.kv_suspect = self._installer.kv_resident = True
            if not await self._installer.clear_caches():
                raise self._core.died("it did not clear its prefix cache when it woke")

"""How long a start is waited for: as long as it shows signs of life, and never beyond its limit.

A large model loads for many minutes, and a start that hangs should not take as long. A sign is a line in the engine's
log, a new process, one that ended, or work: processor time, or bytes read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

LOOK_SECONDS = 1.0
WORK_SECONDS = 0.2
"""Processor time that is work; less is what idle threads use."""
WORK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Signs:
    """Of one look at a start."""

    log_bytes: int
    pids: frozenset[int]
    processor_seconds: float
    read_bytes: int

    def moved_since(self, before: Signs) -> bool:
        return (
            (self.log_bytes, self.pids) != (before.log_bytes, before.pids)
            or self.processor_seconds - before.processor_seconds >= WORK_SECONDS
            or self.read_bytes - before.read_bytes >= WORK_BYTES
        )


def signs_of(log_bytes: int, processes: Iterable[psutil.Process]) -> Signs:
    pids, seconds, read = set(), 0.0, 0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds += times.user + times.system
            read += process.io_counters().read_chars
            pids.add(process.pid)
    return Signs(log_bytes, frozenset(pids), seconds, read)


async def started(
    attempt: asyncio.Future[Any], look: Callable[[], Signs], idle_seconds: float, limit_seconds: float
) -> str | None:
    """Wait for the attempt, however it ends. Not None: why it is waited for no longer."""
    began = moved_at = time.monotonic()
    seen = look()
    while not (await asyncio.wait({attempt}, timeout=min(LOOK_SECONDS, idle_seconds, limit_seconds)))[0]:
        now, fresh = time.monotonic(), look()
        if fresh.moved_since(seen):
            seen, moved_at = fresh, now
        if now - began >= limit_seconds:
            return f"no engine core within {limit_seconds} s"
        if now - moved_at >= idle_seconds:
            return f"no engine core, and no sign of life for {idle_seconds} s: no log line, no process, no work"
    return None

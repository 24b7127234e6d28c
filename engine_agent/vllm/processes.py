"""An engine's processes: found, ended for good, and cleared away.

Promises that a process is known by pid and start time, so a reused pid is never killed, and that what a killed
process leaves in shared memory (vLLM's queues, hundreds of MiB an engine) is removed with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

KILL_WAIT_SECONDS = 10.0
"""A killed process is gone within this, unless the kernel is stuck in it."""
SEGMENT_PREFIXES = ("/dev/shm/psm_", "/dev/shm/vllm_dist_")
"""Segments that vLLM makes for its own processes. Staged weights have other names."""


def processes_of(pids: Iterable[int]) -> list[psutil.Process]:
    """Those that live."""
    found: list[psutil.Process] = []
    for pid in pids:
        try:
            found.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found


def descendants() -> set[psutil.Process]:
    """Of this process, without multiprocessing's resource tracker, which serves this whole process."""
    return {p for p in psutil.Process().children(recursive=True) if not _is_resource_tracker(p)}


def own_segments(processes: Iterable[psutil.Process]) -> set[Path]:
    """vLLM's shared-memory files that these processes map and this one does not."""
    return set().union(*(mapped(p.pid) for p in processes)) - mapped(os.getpid())


def remove(segments: Iterable[Path]) -> None:
    """After the end of the processes that mapped them."""
    for segment in segments:
        segment.unlink(missing_ok=True)


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL each, wait until it is gone, and remove what it left. Blocks for KILL_WAIT_SECONDS at most."""
    victims = list(processes)
    segments = own_segments(victims)
    killed = []
    for process in victims:
        try:
            process.kill()
            killed.append(process)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(killed, timeout=KILL_WAIT_SECONDS)
    remove(segments)


def mapped(pid: int) -> set[Path]:
    """vLLM's shared-memory files that a process maps."""
    try:
        paths = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    except OSError:  # it is gone, or its memory is
        return set()
    return {Path(p) for p in paths if p.startswith(SEGMENT_PREFIXES) and not p.endswith(" (deleted)")}


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return True

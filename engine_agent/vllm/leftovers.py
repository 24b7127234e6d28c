"""What an engine's processes leave when their agent is killed: noted while they live, gone before the next start.

They end with their agent by themselves (`lineage`). This is for what that cannot reach: a process that hung in the
kernel, and vLLM's shared memory, which belongs to nobody then. Promises to kill only the very processes that were noted
(by pid, start time and boot), and to remove no segment that a living process maps.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import structlog

from controlplane.processes import start_time
from controlplane.whole_files import write_whole
from engine_agent.vllm.processes import SEGMENT_PREFIXES, mapped, own_segments

log = structlog.get_logger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Leftovers:
    """The note of one engine's processes, in a file beside the agent's memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._noted = ""

    def note(self, processes: Iterable[psutil.Process]) -> None:
        """These live now. Written only when something changed."""
        living = list(processes)
        lives = {str(p.pid): start for p in living if (start := start_time(p.pid)) is not None}
        note = {"boot": _boot(), "lives": lives, "segments": sorted(map(str, own_segments(living)))}
        text = json.dumps(note, sort_keys=True)
        if text != self._noted:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, text)
            self._noted = text

    def clear(self) -> None:
        """Nothing of them is left."""
        self._path.unlink(missing_ok=True)
        self._noted = ""

    def sweep(self) -> None:
        """Before a start: end and remove what an earlier agent's engine left."""
        try:
            note = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return
        if note.get("boot") == _boot():
            killed = [pid for pid, start in note["lives"].items() if _killed(int(pid), start)]
            psutil.wait_procs([p for p in map(_process, killed) if p is not None], timeout=10)
            gone = _remove_unmapped(Path(s) for s in note["segments"] if s.startswith(SEGMENT_PREFIXES))
            if killed or gone:
                log.warning("leftovers_swept", processes=killed, segments=gone)
        self.clear()


def _killed(pid: int, start: int) -> bool:
    if start_time(pid) != start:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def _process(pid: str) -> psutil.Process | None:
    try:
        return psutil.Process(int(pid))
    except psutil.NoSuchProcess:
        return None


def _remove_unmapped(segments: Iterable[Path]) -> list[str]:
    left = {s for s in segments if s.exists()}
    if left:
        left -= set().union(*(mapped(pid) for pid in psutil.pids()))
    for segment in left:
        segment.unlink(missing_ok=True)
    return sorted(s.name for s in left)


def _boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""

"""How processes of one trainer die together: parent-death signals, and descriptors that tell of a death.

A parent-death signal covers a parent that is killed outright (no handler of it runs). Refuses nothing: on a
kernel without them the functions do nothing, and the supervisors' own bounded waits remain.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send `number` to this process when the thread that started it ends. Survives exec, not fork."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")


def watch_process(pid: int) -> int | None:
    """A descriptor that becomes readable when process `pid` ends; None when it has ended, or cannot be seen."""
    try:
        return os.pidfd_open(pid)
    except (OSError, ValueError):
        return None


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    queue = list(children.get(pid, ()))
    while queue:
        found.append(queue.pop(0))
        queue += children.get(found[-1], ())
    return found


def start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot: with the pid, the name of one life. None: it has ended."""
    fields = _stat(Path(f"/proc/{pid}"))
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def _parent(entry: Path) -> int | None:
    fields = _stat(entry)
    return None if fields is None else int(fields[1])


def _stat(entry: Path) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: the name before it may hold spaces and brackets."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None

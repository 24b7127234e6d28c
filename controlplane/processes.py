"""How processes end together, and how one is told from another that got its number.

Two ways to end with another process. `die_with_parent` and `when_ended` watch a pidfd from a thread: they see the
process itself end, may act with a grace, and need a running interpreter. `set_death_signal` asks the kernel: it works
in any state of this process, but fires when the *thread* that started it ends, and sends one signal only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

GRACE_SECONDS = 20.0
"""For an orderly end: longer than each daemon's own limits for its way out."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, *, grace_seconds: float = GRACE_SECONDS) -> None:
    """End this process when process `parent`, which must have started it, ends: SIGTERM, and SIGKILL after a grace.

    Raises:
        ProcessLookupError: `parent` is not this process's parent, or not any more.
    """
    handle = open_process(parent)
    if handle is None:
        raise ProcessLookupError(f"process {parent} is not there any more")
    if os.getppid() != parent:  # asked after the handle was made: the pid cannot have changed hands in between
        os.close(handle)
        raise ProcessLookupError(f"process {parent} is not the parent of this one")
    when_ended(handle, lambda: _end(grace_seconds))


def when_ended(handle: int, action: Callable[[], None]) -> None:
    """Run `action` in a thread of its own once the process behind a pidfd has ended."""

    def wait() -> None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)  # a pidfd becomes readable when its process ends
        poll.poll()
        action()

    threading.Thread(target=wait, name="when-ended", daemon=True).start()


def open_process(pid: int) -> int | None:
    """A pidfd, readable when process `pid` ends; None when it has ended, or cannot be seen."""
    try:
        return os.pidfd_open(pid)
    except (OSError, ValueError):
        return None


def set_death_signal(number: signal.Signals) -> None:
    """Have the kernel send `number` to this process when the thread that started it ends. Survives exec, not fork."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")


def start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot: with the pid, the name of one life. None: it has ended."""
    fields = _stat(Path(f"/proc/{pid}"))
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(entry)) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    queue = list(children.get(pid, ()))
    while queue:
        found.append(queue.pop(0))
        queue += children.get(found[-1], ())
    return found


def _stat(entry: Path) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: the name before it may hold spaces and brackets."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _end(grace_seconds: float) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace_seconds)
    os.kill(os.getpid(), signal.SIGKILL)

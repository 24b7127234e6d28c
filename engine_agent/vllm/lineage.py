"""Ties the life of an engine's processes to the agent that started them.

Promises: once `watch_agent` runs in a process whose environment names an agent, that process ends when the
agent ends, even by SIGKILL. The agent is named by pid and start time, so a reused pid is never mistaken for
it. Refuses nothing: without the two variables a process is nobody's child and is left alone.

PR_SET_PDEATHSIG would not do: it fires when the *thread* that started the child ends.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path

AGENT_PID_VARIABLE = "WEIGHTPLANE_AGENT_PID"
AGENT_START_VARIABLE = "WEIGHTPLANE_AGENT_START"

_START_TIME_FIELD = 22
"""Of /proc/PID/stat, counted from 1 as proc(5) does: the start time in clock ticks since boot."""

_watching = threading.Event()


def process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    after_command = text[text.rindex(")") + 2 :].split()  # the command may hold spaces and brackets
    return after_command[_START_TIME_FIELD - 3]


def agent_identity() -> dict[str, str]:
    """The two variables that name this process as the agent of the children it will start."""
    pid = os.getpid()
    return {AGENT_PID_VARIABLE: str(pid), AGENT_START_VARIABLE: process_start(pid) or ""}


def watch_agent() -> None:
    """In a child of an agent: start the thread that ends this process when the agent ends. Idempotent."""
    pid = int(os.environ.get(AGENT_PID_VARIABLE, "0"))
    if pid in (0, os.getpid()) or _watching.is_set():
        return
    _watching.set()
    try:
        agent = os.pidfd_open(pid)
    except ProcessLookupError:
        _end_this_process()
        return
    if process_start(pid) != os.environ.get(AGENT_START_VARIABLE):
        _end_this_process()
    threading.Thread(target=_end_with, args=(agent,), name="weightplane-agent-watch", daemon=True).start()


def _end_with(agent: int) -> None:
    poll = select.poll()
    poll.register(agent, select.POLLIN)  # a pidfd becomes readable when its process ends
    poll.poll()
    _end_this_process()


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

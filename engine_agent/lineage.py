"""Ties the life of an engine's processes to the agent that started them.

Promises: once `watch_agent` runs in a process whose environment names an agent, that process ends when the
agent ends, even by SIGKILL. The agent is named by pid and start time, so a reused pid is never mistaken for
it. Refuses nothing: without the two variables a process is nobody's child and is left alone.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from controlplane.processes import open_process, start_time, when_ended

AGENT_PID_VARIABLE = "WEIGHTPLANE_AGENT_PID"
AGENT_START_VARIABLE = "WEIGHTPLANE_AGENT_START"

_watching = threading.Event()


def agent_identity() -> dict[str, str]:
    """The two variables that name this process as the agent of the children it will start."""
    pid = os.getpid()
    return {AGENT_PID_VARIABLE: str(pid), AGENT_START_VARIABLE: str(start_time(pid))}


def watch_agent() -> None:
    """In a child of an agent: end this process when the agent ends. Idempotent."""
    pid = int(os.environ.get(AGENT_PID_VARIABLE, "0"))
    if pid in (0, os.getpid()) or _watching.is_set():
        return
    _watching.set()
    agent = open_process(pid)
    if agent is None or str(start_time(pid)) != os.environ.get(AGENT_START_VARIABLE):
        _end_this_process()
    else:
        when_ended(agent, _end_this_process)


def tied_coordinator(*args: Any, **how: Any) -> None:
    """vLLM's process between data parallel cores, which loads no plugin: tied to the agent before it begins."""
    watch_agent()
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    DPCoordinatorProc.run_coordinator(*args, **how)


def tie_coordinator() -> None:
    """In the agent: such processes that are started from here on end with it."""
    from vllm.v1.engine import coordinator

    coordinator.DPCoordinatorProc.run_coordinator = staticmethod(tied_coordinator)


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

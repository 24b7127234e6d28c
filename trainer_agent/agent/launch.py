"""Starts the ranks of this node through torch's elastic launcher, and ends them all, whatever happens to anyone.

The agent spawns `python -m trainer_agent.shim <torchrun arguments> train.py …`, which dies with it. Restarts are the
agent's: it knows whether the trainer was fenced, and proves the last ranks dead.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import structlog

from controlplane.processes import descendants, start_time
from trainer_agent.agent.output import wrapped

log = structlog.get_logger(__name__)

RANKS_SHARE = 0.7
"""Of the time to stop that is the ranks'; the rest is the launcher's, to kill them and to report."""
KILL_SECONDS = 5.0
"""How long killed processes may take to be gone."""


class Launcher:
    """One run of the launcher, with all the processes below it."""

    def __init__(self, process: asyncio.subprocess.Process, stop_seconds: float) -> None:
        self._process = process
        self._stop_seconds = stop_seconds

    @classmethod
    async def start(
        cls, nproc_per_node: int, command: Sequence[str], environment: Mapping[str, str], stop_seconds: float
    ) -> Launcher:
        """Start ranks that run `command` (a Python script and its arguments); see `stop` for `stop_seconds`.

        `environment` says where the ranks write; see `RankOutput`.
        """
        grace = max(int(stop_seconds * RANKS_SHARE), 1)
        # Without the address torch resolves this host's own name, and waits for ever where nothing knows it.
        arguments = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={nproc_per_node}", "--max-restarts=0"]
        arguments += [f"--shutdown-timeout={grace}", *wrapped(command)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trainer_agent.shim",
            *arguments,
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            # Ctrl-C is for the agent, which then ends the ranks in order.
            start_new_session=True,
        )
        return cls(process, stop_seconds)

    async def wait(self) -> int:
        """The launcher's exit code: 0, FENCED, or another one."""
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, which the launcher hands to the ranks; what is left after `stop_seconds` is killed. Idempotent."""
        if self._process.returncode is not None:
            return
        below = lives(self._process.pid)
        self._process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._stop_seconds):
                await self._process.wait()
        below |= lives(self._process.pid)
        if self._process.returncode is None:
            log.warning("ranks_killed", after_seconds=self._stop_seconds)
            self._process.kill()
            async with asyncio.timeout(KILL_SECONDS):
                await self._process.wait()
        for pid, started in below.items():
            with suppress(ProcessLookupError):
                if start_time(pid) == started:
                    os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> dict[int, int]:
    """Processes below `pid`, each with its start time: a process id alone may be another's by now."""
    found = {p: start_time(p) for p in descendants(pid)}
    return {p: started for p, started in found.items() if started is not None}

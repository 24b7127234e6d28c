"""The processes that a command starts on this machine: started, watched, ended in order.

Promises: what one of them died of can be told with its name, its code and the last lines of its log; at the end nothing
that any of them started is left, wherever it moved to, since each inherits a mark in its environment. Each is the
leader of its own session, so that Ctrl-C reaches only the command, which then ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from controlplane.cli.ending import CommandFailed
from controlplane.exit_codes import ExitCode

T = TypeVar("T")

MARK_VARIABLE = "WEIGHTPLANE_CREW"
STOP_SECONDS = 20.0
"""For an orderly end of one process, before it is killed."""
KILL_SECONDS = 5.0
TRACKER = b"resource_tracker"
TRACKER_SECONDS = 3.0
POLL_SECONDS = 0.1
LOG_LINES_SHOWN = 12
LOG_LINE_WIDTH = 240


@dataclass(frozen=True)
class Child:
    """One process of a crew."""

    name: str
    command: str
    """What kind it is: coordinator, engine, …"""
    process: asyncio.subprocess.Process
    log: Path

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None


class Crew:
    """Every process of one command. `mark` is unique to it; `environment` is added to its own for all of them."""

    def __init__(self, logs: Path, mark: str, environment: Mapping[str, str]) -> None:
        self._logs = logs
        self._mark = mark
        self._environment = dict(environment) | {MARK_VARIABLE: mark}
        self._children: list[Child] = []
        self.hurry = False
        """Set at a second Ctrl-C: from then on nobody is asked, everybody is killed."""

    async def start(self, name: str, words: Iterable[str], *, command: str = "") -> Child:
        """Start a process whose output goes to the end of `logs/NAME.log`."""
        log = self._logs / f"{name}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | self._environment,
            )
        child = Child(name, command or name, process, log)
        self._children.append(child)
        return child

    async def weightplane(self, name: str, *words: str) -> Child:
        """Start a daemon of ours that ends when this command does, however that comes about."""
        command, *rest = words
        own = [sys.executable, "-m", "controlplane.cli.main", command, "--die-with-parent", str(os.getpid())]
        return await self.start(name, [*own, *rest], command=command)

    async def within(self, seconds: float, what: str, work: Awaitable[T], *, may_end: Child | None = None) -> T:
        """The result of `work`.

        Raises:
            CommandFailed: a process other than `may_end` ended meanwhile, or `seconds` went by.
        """
        task = asyncio.ensure_future(work)
        deaths = {asyncio.create_task(c.process.wait()): c for c in self._children if c is not may_end}
        try:
            done, _ = await asyncio.wait({task, *deaths}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            if done:
                raise died(next(deaths[d] for d in deaths if d in done))
            raise CommandFailed(ExitCode.FAILED, f"waited {seconds:.0f} s for {what}{self._tails()}")
        finally:
            for waiting in (task, *deaths):
                waiting.cancel()
            await asyncio.gather(task, *deaths, return_exceptions=True)

    async def stop(self, child: Child) -> None:
        """Ask one process to end; kill it and its group if it does not. It is no longer watched."""
        self._children = [c for c in self._children if c is not child]
        if not child.ended and not self.hurry:
            _signal(child.process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._ended_or_hurry(child)
        await self._kill(pid for pid in marked(self._mark) if _group(pid) == child.process.pid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await child.process.wait()

    async def stop_all(self) -> None:
        """End every process, those that were started together at once, the last ones first; and what they left."""
        for _, together in groupby(reversed(self._children.copy()), key=lambda child: child.command):
            await asyncio.gather(*(self.stop(child) for child in together))
        await self._kill(marked(self._mark))

    async def _kill(self, pids: Iterable[int]) -> None:
        """SIGKILL, but Python's resource trackers last: they end by themselves and unlink what the dead shared."""
        targets = set(pids)
        trackers = {pid for pid in targets if TRACKER in _command(pid)}
        for pid in targets - trackers:
            _signal(pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TRACKER_SECONDS):
                while trackers & set(marked(self._mark)):  # noqa: ASYNC110 - a process of others tells nobody
                    await asyncio.sleep(POLL_SECONDS)
        for pid in trackers:
            _signal(pid, signal.SIGKILL)

    async def _ended_or_hurry(self, child: Child) -> None:
        while not child.ended and not self.hurry:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await child.process.wait()

    def _tails(self) -> str:
        return "".join(_tail(child) for child in self._children)


def died(child: Child) -> CommandFailed:
    """What to say of a process that ended though it should not have."""
    return CommandFailed(ExitCode.FAILED, how_it_ended(child.name, child.process.returncode, _last_lines(child)))


def how_it_ended(name: str, code: int | None, lines: Iterable[str]) -> str:
    """What to say of a process's end: its code, and the last lines of its log."""
    how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
    return f"{name} ended with {how}{_shown(name, lines)}"


def marked(mark: str) -> list[int]:
    """Processes of this user that carry the mark, this one excepted."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _tail(child: Child) -> str:
    return _shown(child.name, _last_lines(child))


def _last_lines(child: Child) -> list[str]:
    return child.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]


def _shown(name: str, lines: Iterable[str]) -> str:
    return "".join(f"\n  {name} | {line[:LOG_LINE_WIDTH]}" for line in lines)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _group(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return None


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""

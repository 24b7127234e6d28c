"""What the ranks write: passed on as it comes, and the last lines of each rank kept for `Lifecycle.TailLogs`.

Each rank has two pipes, for standard output and standard error, under names in the agent's private directory; the
launcher's ranks open them by `wrapped`. One thread reads them, so neither a terminal that stands still nor a busy
agent makes the other wait; a rank waits only if whoever reads the agent's own output does.

Promises: nothing is lost or changed on its way; what is kept is bounded in lines and in their length.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_LINES = 1000
"""Kept of each rank."""
MAX_LINE_BYTES = 4096
"""Kept of each line."""
READ_BYTES = 64 * 1024
IDLE_MILLISECONDS = 50
"""A line without an end, such as a progress bar, is passed on after so long."""
STOP_SECONDS = 5.0
DIRECTORY_VARIABLE = "WEIGHTPLANE_RANK_OUTPUT"
_SHELL = f'exec "$@" >"${DIRECTORY_VARIABLE}/$LOCAL_RANK.out" 2>"${DIRECTORY_VARIABLE}/$LOCAL_RANK.err"'


@dataclass(frozen=True, slots=True)
class Line:
    """One that a rank wrote."""

    text: str
    error: bool


class _Pipe:
    """One end that is read. Held open for writing too, so that it does not end with its writer."""

    def __init__(self, path: Path, to: int, kept: deque[Line], *, error: bool) -> None:
        os.mkfifo(path, 0o600)
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._to = to
        self._kept = kept
        self._error = error
        self._unsent = b""
        """The beginning of a line."""
        self._line = b""

    def read(self) -> bool:
        """Take in what is there, and pass whole lines on. False: nothing was."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        whole, end, rest = (self._unsent + data).rpartition(b"\n")
        self._unsent = rest[:READ_BYTES]
        _write(self._to, whole + end + rest[READ_BYTES:])
        self._keep(data)
        return True

    def flush(self) -> None:
        _write(self._to, self._unsent)
        self._unsent = b""

    def _keep(self, data: bytes) -> None:
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest[:MAX_LINE_BYTES]
        self._kept.extend(Line(line[:MAX_LINE_BYTES].decode(errors="replace"), self._error) for line in lines)


class RankOutput:
    """The output of all ranks of this node, over all of their lives."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self._kept: list[deque[Line]] = [deque(maxlen=MAX_LINES) for _ in range(count)]
        self._pipes = [
            _Pipe(directory / f"{rank}.{name}", stream.fileno(), kept, error=name == "err")
            for rank, kept in enumerate(self._kept)
            for name, stream in (("out", sys.__stdout__), ("err", sys.__stderr__))
            if stream is not None
        ]
        self._wake = os.pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._pass_on, name="rank-output", daemon=True)
        self._thread.start()

    def tail(self, rank: int, lines: int) -> list[Line] | None:
        """The last lines of a rank, oldest first; None: there is no such rank."""
        if not 0 <= rank < len(self._kept):
            return None
        return list(self._kept[rank])[-lines:]

    def close(self) -> None:
        """Pass on what is left, and let go. The ranks have ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.close(self._wake[1])
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():  # else whoever reads our output stands still; the process ends anyway
            for descriptor in (*(p.descriptor for p in self._pipes), self._wake[0]):
                os.close(descriptor)

    def _pass_on(self) -> None:
        poller = select.poll()
        by_descriptor = {p.descriptor: p for p in self._pipes}
        for descriptor in (*by_descriptor, self._wake[0]):
            poller.register(descriptor, select.POLLIN | select.POLLHUP)
        ended = False
        while not ended:
            ready = [descriptor for descriptor, _ in poller.poll(IDLE_MILLISECONDS)]
            ended = self._wake[0] in ready
            for descriptor, pipe in by_descriptor.items():
                if descriptor in ready:
                    pipe.read()
                elif not ready:
                    pipe.flush()
        for pipe in self._pipes:
            while pipe.read():
                pass
            pipe.flush()


def wrapped(command: Sequence[str]) -> list[str]:
    """`command` (a Python script or `-m module`, and its arguments) as torch's launcher is to run it, writing there."""
    return ["--no-python", "/bin/sh", "-c", _SHELL, "sh", sys.executable, "-u", *command]


def _write(to: int, data: bytes) -> None:
    with suppress(OSError):  # nobody reads our output any more: the ranks are not to wait for that
        while data:
            data = data[os.write(to, data) :]

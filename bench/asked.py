"""A contender in a process of its own, which does its work each time that it is asked, and says how long it took."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen

END_SECONDS = 20


class Asked:
    """The process. `heard` is its first line."""

    def __init__(self, process: Popen[str]) -> None:
        self._process = process
        self.heard = self._line()

    def seconds(self) -> float:
        """It does its work once. Raises SystemExit: it died."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} died")
        return line.strip()


@contextmanager
def asked(*arguments: str) -> Iterator[Asked]:
    """Python with these arguments, until the block ends."""
    process = Popen([sys.executable, *arguments], stdin=PIPE, stdout=PIPE, text=True)
    try:
        yield Asked(process)
    finally:
        process.terminate()
        process.wait(END_SECONDS)


def answer_each(first: str, work: Callable[[], float]) -> None:
    """In that process: say the first line, then do the work each time that somebody asks."""
    print(first, flush=True)
    for _ in sys.stdin:
        print(work(), flush=True)

"""The phases of one piece of work, each from where to where: measured always, since that costs nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """Monotonic seconds."""

    name: str
    start: float
    end: float


class Phases:
    """In their order. One that ends with an exception is there too, and is the last."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.done: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is one."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.done.append(Phase(name, start, time.monotonic()))

    def split(self, name: str, seconds: float) -> None:
        """The last one's end, so many seconds of it, was a phase of its own."""
        last = self.done.pop()
        border = max(last.start, last.end - seconds)
        self.done += [Phase(last.name, last.start, border), Phase(name, border, last.end)]

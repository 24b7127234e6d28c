"""A bar while a command works or waits for long: for people at a terminal, and for nobody else.

Promises: it goes to standard error, never to standard output; nothing is written where that is no terminal, where the
command prints JSON, or for what is done at once; and it is gone when the work is over.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SHOW_AFTER_SECONDS = 0.4
"""Work that is done by then is not worth a look."""
WIDTH = 24


class Bar:
    """What work tells of itself."""

    def __init__(self, what: str, total: float | None, *, quiet: bool) -> None:
        self._what = what
        self._total = total
        self._shows = not quiet and sys.stderr.isatty()
        self._show_at = time.monotonic() + SHOW_AFTER_SECONDS
        self._done = 0.0
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, done: float | None = None, said: str = "") -> None:
        """So much is done, of the total; None: one more. `said`: what goes on, in a few words."""
        self._done = self._done + 1 if done is None else done
        if not self._shows or time.monotonic() < self._show_at:
            return
        if self._progress is None:
            self._progress, self._task = self._started()
        assert self._task is not None, "made with it"
        self._progress.update(self._task, completed=self._done, said=said)

    def end(self) -> None:
        self._shows = False
        if self._progress is not None:
            self._progress.stop()

    def _started(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(WIDTH),
            TimeElapsedColumn(),
            TextColumn("{task.fields[said]}"),
        )
        # What the command prints meanwhile goes above the bar where both are on one screen, else where it belongs.
        progress = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty())
        progress.start()
        return progress, progress.add_task(self._what, total=self._total, said="")


@contextmanager
def bar(what: str, total: float | None = None, *, quiet: bool = False) -> Iterator[Bar]:
    """While the block runs. `total`: None, where nobody knows how much there is. `quiet`: the command prints JSON."""
    made = Bar(what, total, quiet=quiet)
    try:
        yield made
    finally:
        made.end()

"""What the demo shows while it runs: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from controlplane.cli.demo.progress import Progress
from controlplane.cli.fleet_table import applied_word, engines_table, state_word
from weightplane.v1 import operator_pb2

STEPS_SHOWN = 12
REFRESHES_PER_SECOND = 4


class Screen(Protocol):
    """Where the demo's news go. A context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, line: str) -> None:
        """One line for people."""
        ...

    def event(self, event: Mapping[str, Any]) -> None:
        """News of the training run."""
        ...

    def fleet(self, view: operator_pb2.FleetView) -> None:
        """The fleet changed."""
        ...


def make_screen(console: Console, progress: Progress) -> Screen:
    return LiveScreen(console, progress) if console.is_terminal else PlainScreen(console, progress)


class PlainScreen:
    """One line for each piece of news, the engines' versions on the lines where they matter."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._started = time.monotonic()
        self._view = operator_pb2.FleetView()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def say(self, line: str) -> None:
        text = Text(f"[{time.monotonic() - self._started:6.1f} s] {line}")
        self._console.print(text, soft_wrap=True)

    def event(self, event: Mapping[str, Any]) -> None:
        line = self._progress.take(event)
        if line is not None:
            engines = "  ".join(engine_words(self._view))
            self.say(f"{line}  |  {engines}" if engines else line)

    def fleet(self, view: operator_pb2.FleetView) -> None:
        self._view = view


class LiveScreen:
    """The steps so far, the engines now, and the last line said."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._progress = progress
        self._started = time.monotonic()
        self._view = operator_pb2.FleetView()
        self._last = ""
        self._live = Live(console=console, refresh_per_second=REFRESHES_PER_SECOND, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def say(self, line: str) -> None:
        self._last = line

    def event(self, event: Mapping[str, Any]) -> None:
        self._last = self._progress.take(event) or self._last

    def fleet(self, view: operator_pb2.FleetView) -> None:
        self._view = view

    def _render(self) -> RenderableType:
        head = Text(f"{time.monotonic() - self._started:5.0f} s  {self._last}", style="bold")
        parts: list[RenderableType] = [head]
        if self._view.engines:
            parts += [Text(), engines_table(self._view, time.time())]
        if self._progress.steps:
            parts += [Text(), steps_table(self._progress)]
        return Group(*parts)


def steps_table(progress: Progress) -> Table:
    """The last steps, newest at the bottom."""
    table = Table("STEP", "REWARD", "LOSS", "VERSION", "ROLLOUT", "TRAIN", "PUSH", box=None, pad_edge=False)
    for step in progress.steps[-STEPS_SHOWN:]:
        phases = [
            f"{step.seconds[name]:.1f} s" if name in step.seconds else "" for name in ("rollout", "train", "push")
        ]
        number = f"{step.number}/{progress.steps_wanted}"
        table.add_row(number, f"{step.reward:.3f}", f"{step.loss:.4f}", str(step.version), *phases)
    return table


def engine_words(view: operator_pb2.FleetView) -> list[str]:
    """`engine-0 1.4 serving` for each engine."""
    return [f"{e.status.engine.engine_id} {applied_word(e)} {state_word(e)}" for e in view.engines]

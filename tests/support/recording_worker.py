"""A vLLM worker that writes down when it computed and when it was being installed into; see `Interval`.

One line for each interval, in the file that `FILE_VARIABLE` names. All processes of a host have one monotonic clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_agent.vllm.worker import WorkerExtension

CLASS = f"{__name__}.RecordingWorker"
FILE_VARIABLE = "WEIGHTPLANE_TEST_INTERVALS"
_OPENS = ("begin", "install")
"""Steps that touch weights first."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Monotonic seconds. `forward`: a forward pass. `install`: from the step that touches the weights first to the end
    of vLLM's session, when caches are cleared and the version has its label."""

    what: str
    worker: int
    began: float
    ended: float

    def overlaps(self, other: Interval) -> bool:
        return self.worker == other.worker and self.began < other.ended and other.began < self.ended


def read(file: Path) -> list[Interval]:
    """What was written until now, each worker's in order."""
    lines = (line.split() for line in file.read_text().splitlines())
    return [Interval(what, int(worker), float(began), float(ended)) for what, worker, began, ended in lines]


class RecordingWorker(WorkerExtension):
    """`self` is vLLM's worker."""

    def weightplane_facts(self: Any) -> dict[str, Any]:
        recorder = _Recorder(os.open(os.environ[FILE_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT))
        runner, engine = self.model_runner, self.weight_transfer_engine
        runner.execute_model = recorder.forward(runner.execute_model)
        engine.receive_weights = recorder.step(engine.receive_weights)
        engine.finish_weight_update = recorder.finish(engine.finish_weight_update)
        return WorkerExtension.weightplane_facts(self)


class _Recorder:
    """Of one worker process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._opened: float | None = None

    def forward(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **how: Any) -> Any:
            began = time.monotonic()
            try:
                return execute(*args, **how)
            finally:
                self._write("forward", began)

        return recorded

    def step(self, receive: Callable[[Any], None]) -> Callable[[Any], None]:
        def recorded(update: Any) -> None:
            if update.step in _OPENS:
                self._opened = time.monotonic()
            receive(update)

        return recorded

    def finish(self, finish: Callable[[], None]) -> Callable[[], None]:
        def recorded() -> None:
            finish()
            if self._opened is not None:
                self._write("install", self._opened)
            self._opened = None

        return recorded

    def _write(self, what: str, began: float) -> None:
        os.write(self._descriptor, f"{what} {os.getpid()} {began!r} {time.monotonic()!r}\n".encode())

"""What the training run tells: its events file, read as it grows, and what they add up to.

`Progress` is pure; `follow` is the only reader. Events that are not known are kept out, so that the training script
may say more than the demo shows.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: rolled out, learned, pushed."""

    number: int
    reward: float
    loss: float
    version: int
    seconds: Mapping[str, float]
    """Of each phase: rollout, train, push."""


@dataclass(slots=True)
class Progress:
    """All that the events said so far."""

    steps_wanted: int
    steps: list[Step] = field(default_factory=list)
    reward_first: float | None = None
    """Mean over the held-out prompts before training."""
    reward_last: float | None = None
    """The same after it."""
    update_seconds: list[float] = field(default_factory=list)
    exported: bool = False
    samples: tuple[str, ...] = ()
    """A few held-out answers, as of the last evaluation."""

    def take(self, event: Mapping[str, Any]) -> str | None:
        """Add one event; a line for people if it is worth one."""
        kind = event.get("event")
        if kind == "pushed":
            self.update_seconds.append(event["seconds"])
            return self._pushed(event)
        if kind == "evaluated":
            return self._evaluated(event)
        if kind == "step_done":
            return self._stepped(event)
        if kind == "resumed":
            return f"the trainer goes on from step {event['step']}"
        if kind == "exported":
            self.exported = True
            return "the trainer wrote its weights out"
        return None

    @property
    def update_seconds_median(self) -> float | None:
        return round(statistics.median(self.update_seconds), 3) if self.update_seconds else None

    def _pushed(self, event: Mapping[str, Any]) -> str | None:
        if event["step"] > 0 and self.steps:
            return None  # the step's own line says it
        return f"pushed version {event['term']}.{event['version']} in {event['seconds']:.2f} s"

    def _evaluated(self, event: Mapping[str, Any]) -> str:
        self.reward_last = event["reward"]
        if self.reward_first is None:
            self.reward_first = event["reward"]
        self.samples = tuple(event.get("samples", ()))
        return f"held-out reward {event['reward']:.3f} after {event['step']} steps"

    def _stepped(self, event: Mapping[str, Any]) -> str:
        loss = round(event["loss"], 4) + 0.0  # a loss of -0.0 is none
        step = Step(event["step"], event["reward"], loss, event["version"], event["seconds"])
        self.steps = [s for s in self.steps if s.number < step.number] + [step]
        phases = "  ".join(f"{name} {seconds:.1f} s" for name, seconds in step.seconds.items())
        head = f"step {step.number}/{self.steps_wanted}  reward {step.reward:.3f}  loss {step.loss:.4f}"
        return f"{head}  version {step.version}  {phases}"


async def follow(file: Path) -> AsyncIterator[dict[str, Any]]:
    """The objects in `file`, one a line, as they come; for ever. The file may not be there yet."""
    rest = b""
    position = 0
    while True:
        new = _read_from(file, position)
        position += len(new)
        *lines, rest = (rest + new).split(b"\n")
        for line in lines:
            event: dict[str, Any] = json.loads(line)
            yield event
        if not lines:
            await asyncio.sleep(POLL_SECONDS)


def _read_from(file: Path, position: int) -> bytes:
    try:
        with file.open("rb") as opened:
            opened.seek(position)
            return opened.read()
    except FileNotFoundError:
        return b""

"""What becomes of the requests in an engine that is paused, in vLLM's words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DEFAULT_WAIT_SECONDS = 60.0
MAX_INSTALL_WAIT_SECONDS = 90.0
"""Below the time that a fleet gives its engines from go to the last outcome."""


class PauseMode(Enum):
    """What becomes of the requests in the engine."""

    KEEP = "keep"
    """They stand still, and go on afterwards: after an install under the new version, as their spans say."""
    ABORT = "abort"
    """They end, with the tokens and the spans that they have."""
    WAIT = "wait"
    """They go on to their end, within a limit."""


@dataclass(frozen=True, slots=True)
class PausePolicy:
    """How an engine is paused. New requests wait outside in every mode."""

    mode: PauseMode = PauseMode.KEEP
    wait_seconds: float = DEFAULT_WAIT_SECONDS
    """With WAIT: how long requests may take."""
    fallback: PauseMode = PauseMode.KEEP
    """With WAIT: what becomes of those that took longer."""

    @property
    def problem_at_an_install(self) -> str:
        """As `problem`; the fleet waits for an install too, and takes an engine that is late for lost."""
        long = self.mode is PauseMode.WAIT and self.wait_seconds > MAX_INSTALL_WAIT_SECONDS
        limit = f"an install waits {MAX_INSTALL_WAIT_SECONDS:.0f} s for requests at most, not {self.wait_seconds:.0f}"
        return self.problem or (limit if long else "")

    @property
    def problem(self) -> str:
        """Why it cannot be meant; empty if it can."""
        if self.fallback is PauseMode.WAIT:
            return "the fallback of waiting is keep or abort"
        return "" if self.wait_seconds >= 0 else f"{self.wait_seconds} s is no time to wait"


KEEP = PausePolicy()

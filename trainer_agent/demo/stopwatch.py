"""How long each part of a step took."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds since it was made or last read."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def lap(self) -> float:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        return round(seconds, 3)

"""Counts the real engines that a run of the tests starts, in whatever process below this one: each has an engine core.

Looked for once a second, since it is vLLM that starts them, and in many processes; a core takes longer than that to
come up. An in-process `LLM`, which a fresh reference is, has none and is not counted.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import psutil

LIMIT = 8
"""Of `make test`: each takes 16 to 34 s on two cores that do nothing else, of its 20 minutes."""
CORE = "VLLM::EngineCore"
EVERY_SECONDS = 1.0


class EngineStarts:
    """Of one run."""

    def __init__(self) -> None:
        self._seen: set[psutil.Process] = set()
        self._over = threading.Event()
        self._watch: threading.Thread | None = None

    @property
    def count(self) -> int:
        return len(self._seen)

    def begin(self) -> None:
        if self._watch is None:
            self._watch = threading.Thread(target=self._look_on, name="count-engine-starts", daemon=True)
            self._watch.start()

    def end(self) -> None:
        self._over.set()

    def look(self) -> int:
        """The count now."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process not in self._seen and (process.cmdline() or [""])[0].startswith(CORE):
                    self._seen.add(process)
        return self.count

    def _look_on(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            self.look()

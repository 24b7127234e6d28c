"""What systemd is told of a daemon: that it is ready, how it fares, that it lives, that it ends.

Promises: a watchdog is fed only while the daemon's event loop turns *and* its work moved since the last time; without
NOTIFY_SOCKET nothing is sent and nothing runs. Refuses to feed from a thread: that would live on when the loop hangs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping

from sdnotify import SystemdNotifier

FEEDS_PER_PERIOD = 3
"""Of the watchdog's period: one lost or late feed kills nobody."""
EXTEND_SECONDS = 60.0
"""How much longer systemd waits for a start, from each look at which it moved."""


class Supervisor:
    """systemd, or nobody. Used from one event loop."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._notifier = SystemdNotifier() if environment.get("NOTIFY_SOCKET") else None
        self._ready = False
        self.watchdog_seconds = _watchdog(environment)
        """Period within which it must be fed; None: nobody watches."""

    def ready(self, status: str) -> None:
        """It serves, or can. The first call says so; later ones change the status only."""
        self._send(*(() if self._ready else ("READY=1",)), f"STATUS={status}")
        self._ready = True

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={text}")

    def stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=ends in order")

    async def feed(self, moved: Callable[[], object]) -> None:
        """For ever. `moved` returns something else than the last time if the daemon's work went on since."""
        if self._notifier is None:
            return
        before: object = None
        while True:
            now = moved()
            if now != before:
                self._say_alive()
            before = now
            await asyncio.sleep((self.watchdog_seconds or EXTEND_SECONDS) / FEEDS_PER_PERIOD)

    def _say_alive(self) -> None:
        extend = () if self._ready else (f"EXTEND_TIMEOUT_USEC={int(EXTEND_SECONDS * 1e6)}",)
        watchdog = ("WATCHDOG=1",) if self.watchdog_seconds else ()
        self._send(*extend, *watchdog)

    def _send(self, *lines: str) -> None:
        if self._notifier is not None and lines:
            self._notifier.notify("\n".join(lines))


class Turns:
    """Work that is nothing but the event loop: each look at it is a turn."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> int:
        self._count += 1
        return self._count


def _watchdog(environment: Mapping[str, str]) -> float | None:
    """systemd's own rule: WATCHDOG_PID, if it is there, names the process that is meant."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    micros = environment.get("WATCHDOG_USEC", "0")
    return int(micros) / 1e6 if micros.isdecimal() and int(micros) else None

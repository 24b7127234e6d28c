"""A port that nobody listens on now, for daemons that must know theirs beforehand."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 10_000, 32_000
"""Below those that the kernel gives to whoever asks for any port: no connection that is made meanwhile takes it."""
_of_this_process = random.SystemRandom()
"""Not the tests' own, which two runs may begin alike."""


def free_port() -> int:
    """Of the loopback. Another process may take it before it is bound: only for tests."""
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = _of_this_process.randrange(FIRST, LAST)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port

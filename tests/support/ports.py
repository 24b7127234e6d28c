"""A port that nobody listens on now, for daemons that must know theirs beforehand."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Of the loopback. Another process may take it before it is bound: only for tests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

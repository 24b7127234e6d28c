"""Addresses as people write them: `host:port`, an IPv6 host in brackets (S4).

Promises that a bare IPv6 address is refused, never cut at one of its colons.
"""

from __future__ import annotations

import ipaddress

_LOCAL_NAMES = frozenset({"localhost", "ip6-localhost"})
MAX_PORT = 65535


def split_address(text: str) -> tuple[str, int]:
    """`("::1", 7070)` of `[::1]:7070`. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError(f"{text!r} is no host:port; an IPv6 host stands in brackets, such as [::1]:7070")
    if not port.isdecimal() or int(port) > MAX_PORT:
        raise ValueError(f"{text!r}: {port!r} is no port")
    return (host[1:-1] if bracketed else host), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it. A name other than localhost may be anybody's."""
    if host.lower() in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

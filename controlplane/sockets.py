"""TCP sockets of this process that a library opened and shows to nobody, found by their addresses.

Two things need them. A forked child must not keep them: it would hide its parent's death from the peers, which then
wait until the library's timeout. And an operation of gloo's ends at once when its connections are cut, where it would
else hold memory and threads until that timeout.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress

Address = tuple[str, int]
"""Host, as numbers, and port."""
_MAPPED = "::ffff:"


class Sockets:
    """Those bound to one of `own`, and those connected with one of `others`."""

    def __init__(self, own: Iterable[Address], others: Iterable[Address] = ()) -> None:
        self._own = frozenset(own)
        self._others = frozenset(others)

    def cut(self) -> None:
        """End the connections, for both sides. Their owner closes the descriptors."""
        for descriptor in self._found():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # what only listens is left alone
                connection.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """In a forked child: they are the parent's."""
        for descriptor in self._found():
            os.close(descriptor)

    def _found(self) -> list[int]:
        return [d for d in _descriptors() if _address(d) in self._own or _address(d, peer=True) in self._others]


def listeners() -> set[Address]:
    """Addresses at which this process listens now."""
    found = set()
    for descriptor in _descriptors():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
            if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(_address(descriptor) or ("", 0))
    return found


def _descriptors() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name)


def _address(descriptor: int, *, peer: bool = False) -> Address | None:
    """None: it has no such address, or is closed by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
        if opened.family in (socket.AF_INET, socket.AF_INET6):
            host, port = (opened.getpeername() if peer else opened.getsockname())[:2]
            return str(host).removeprefix(_MAPPED), int(port)
    return None

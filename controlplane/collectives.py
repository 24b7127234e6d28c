"""Raw process groups of torch between processes of ours, independent of anybody else's, with a deadline on each step.

What gather groups (ranks of one slot) and links (a rank and engine agents) share. Both exchange host memory, by gloo.
A group that is given a CUDA device is NCCL's; nothing in the product makes one yet, only the test on two GPUs does. An
operation that gloo has begun can be neither interrupted nor resumed: it ends when its peers do, when the group is
closed, or by gloo's own timeout.

Imports torch: for the agents' processes only, which have it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from controlplane.sockets import Address, Sockets, listeners

OPERATION_SECONDS = 30.0
"""Longest that gloo itself waits for a peer in one operation."""
GRACE_SECONDS = 5.0
"""Beyond that: then we give an operation up that should have ended by itself."""
POLL_SECONDS = 0.002
SHORTEST_POLL_SECONDS = 0.00005
POLL_SHARE = 0.03
"""Of what an operation took so far: its end is noticed so much too late at most. A piece of 64 MiB takes 20 ms."""

_c10d: Any = dist
"""Stores and the groups' options are public in torch.distributed, but not in its stubs."""

_PLACE = re.compile(r"^\[[^\]]*\] ")

_making = threading.Lock()
"""Held while gloo begins to listen somewhere: where is seen by what listens then and not before."""

Between = Callable[[], None]
"""Called while waiting; raises when the wait has lost its sense."""


class Group:
    """One process group. Not for use by several threads at once, but for `close`."""

    def __init__(self, store: Any, rank: int, size: int, *, host: str, device: torch.device | None = None) -> None:
        """Connect with everybody who comes to the store. They must be there already: this wait cannot be interrupted.

        `host`: the address of this host at which the others reach it.

        Raises:
            RuntimeError: somebody went away meanwhile.
        """
        self._pending: list[Any] = []
        self.sockets = Sockets(())
        if device is not None and device.type == "cuda":
            self._group = _nccl(store, rank, size)
            return
        with _making:
            before = listeners()
            made = _c10d.ProcessGroupGloo.create_device(hostname=host)
            own = next(iter(listeners() - before), (host, 0))
        store.set(f"address/{rank}", f"{own[0]} {own[1]}")
        self._group = _gloo(store, rank, size, made)
        self.sockets = Sockets([own], [_address(store, r) for r in range(size) if r != rank])

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """From rank 0 to all others: begins it. `end` waits for what it returns."""
        options = _c10d.BroadcastOptions()
        options.rootRank = 0
        return self._begun(self._group.broadcast([tensor], options))

    def allgather(self, theirs: Sequence[torch.Tensor], mine: torch.Tensor) -> Any:
        """Everybody's tensor to everybody: begins it."""
        return self._begun(self._group.allgather([list(theirs)], [mine]))

    def close(self) -> None:
        """Close the connections, which ends what this side and the others wait for. Idempotent."""
        self.sockets.cut()
        held, self._pending, self._group = [self._group, *self._pending], [], None
        _let_go(held)

    def _begun(self, work: Any) -> Any:
        self._pending = [w for w in self._pending if not w.is_completed()] + [work]
        return work


def end(work: Any, between: Between) -> None:
    """Wait for an operation.

    Raises:
        RuntimeError: it failed, or did not end in time. What `between` raises: the operation goes on then.
    """
    began = time.monotonic()
    try:
        while not work.is_completed():
            between()
            waited = time.monotonic() - began
            if waited > OPERATION_SECONDS + GRACE_SECONDS:
                raise RuntimeError(f"an operation did not end within {OPERATION_SECONDS + GRACE_SECONDS} s")
            time.sleep(min(POLL_SECONDS, SHORTEST_POLL_SECONDS + waited * POLL_SHARE))
        work.wait()
    finally:
        del work  # it holds the memory, and an error's traceback would hold it


def wait_for_keys(store: Any, keys: Sequence[str], seconds: float, between: Between) -> list[str]:
    """Wait until all keys are there. Those that are missing at the deadline; raises what `between` and the store do."""
    deadline = time.monotonic() + seconds
    while not store.check(list(keys)):
        between()
        if time.monotonic() > deadline:
            return [k for k in keys if not store.check([k])]
        time.sleep(POLL_SECONDS)
    return []


def serve_store(host: str, listener: int, port: int) -> Any:
    """A store in this process, on a socket that listens already."""
    limit = timedelta(seconds=OPERATION_SECONDS)
    return _c10d.TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener)


def open_store(host: str, port: int, seconds: float) -> Any:
    """Another process's store. Raises RuntimeError: nobody answers there."""
    return _c10d.TCPStore(host, port, None, False, timedelta(seconds=seconds), wait_for_workers=False)


def prefixed(prefix: str, store: Any) -> Any:
    """The store, with keys of our own."""
    return _c10d.PrefixStore(prefix, store)


def first_line(error: Exception) -> str:
    """What gloo or a store says, less the place in their source and the advice."""
    return _PLACE.sub("", str(error).partition("\n")[0]).partition(" This is typically")[0].rstrip(".")


def _gloo(store: Any, rank: int, size: int, device: Any) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=OPERATION_SECONDS)
    options._devices = [device]
    options._threads = 1
    return _c10d.ProcessGroupGloo(prefixed("gloo", store), rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=OPERATION_SECONDS)
    return _c10d.ProcessGroupNCCL(prefixed("nccl", store), rank, size, options)


def _address(store: Any, rank: int) -> Address:
    host, port = store.get(f"address/{rank}").decode().split()
    return host, int(port)


def _let_go(held: list[Any]) -> None:
    """Destroy a group. `held`: it and its operations, the only reference to them."""
    for work in held[1:]:
        _soon(work)
    if all(work.is_completed() for work in held[1:]):
        held.clear()
        return
    # gloo's destructor waits for the operation. Not a daemon: one that is cut off in it aborts the process.
    threading.Thread(target=held.clear, name="weightplane-group-end", daemon=False).start()


def _soon(work: Any) -> None:
    """An operation whose connections were cut ends in a moment."""
    deadline = time.monotonic() + 50 * POLL_SECONDS
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)

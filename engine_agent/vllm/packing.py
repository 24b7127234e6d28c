"""Inside vLLM's workers, on a CPU: matrices are packed by a thread of its own while the next ones are loaded.

vLLM multiplies by a packed copy of each matrix, which oneDNN makes; of an install that is nearly half, done in
vLLM between two loads. Nobody multiplies meanwhile; what is computed at the load's end waits for the thread.

Promises that everything is packed when `beside` is left, or that it raises what went wrong (INV-1); that at most
`WAITING` matrices wait, so that no second model comes to lie in memory; and that nothing but this process's own memory
is read by the thread, never the sender's (INV-12). Where this process has one core to run on, all is as in vLLM.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import _custom_ops as ops

WAITING = 2
"""Matrices that were loaded and are not packed yet, beside the one in work."""
NAMES = ("CPUDNNLGEMMHandler", "create_onednn_mm")
"""What this knows of vLLM."""


def has_cores() -> bool:
    """Whether a second thread would run beside the first. Threads of vLLM's that are bound to cores pass that on."""
    return len(os.sched_getaffinity(0)) > 1


@contextmanager
def beside() -> Iterator[Callable[[], None]]:
    """Gives what waits until everything is packed that was loaded so far. It and the end raise what packing raised. The
    inside may end in any way: the thread is over then."""
    if not (has_cores() and getattr(ops, "_supports_onednn", False) and all(hasattr(ops, name) for name in NAMES)):
        yield _nothing_waits
        return
    packer, plain = Packer(), ops.create_onednn_mm
    ops.create_onednn_mm = packer.take
    try:
        yield packer.settle
        packer.settle()
    finally:
        ops.create_onednn_mm = plain
        packer.close()


def _nothing_waits() -> None:
    """As in vLLM: what is loaded is packed."""


class Packer:
    """One thread, and what waits for it."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[Any, torch.Tensor, int] | None] = queue.Queue(WAITING)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weightplane-packing", daemon=True)
        self._thread.start()

    def take(self, weight: torch.Tensor, primitive_cache_size: int = 128) -> Any:
        """As vLLM's `create_onednn_mm`: the handler of a matrix, which cannot be multiplied by yet."""
        handler = ops.CPUDNNLGEMMHandler()
        handler.k, handler.n = weight.size()
        self._waiting.put((handler, weight, primitive_cache_size))
        return handler

    def settle(self) -> None:
        """Returns when everything that was taken is packed. Raises what packing raised."""
        self._waiting.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """The thread is over when this returns."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                if self._failure is None:
                    _pack(*item)
            except Exception as error:
                self._failure = error
            del item  # the matrix is not kept until the next one comes
            self._waiting.task_done()


def _pack(handler: Any, weight: torch.Tensor, primitive_cache_size: int) -> None:
    made = torch.ops._C.create_onednn_mm_handler(weight, primitive_cache_size)
    handler.handler_tensor = torch.tensor(made, dtype=torch.int64)

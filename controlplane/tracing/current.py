"""The tracer of this process, and what everybody asks of it. While there is none every call returns at once.

A span is handed over when it is over, whole; whoever makes one asks `enabled` first, so that nothing is put together
for nobody. What is handed over waits in a bounded queue, and never keeps anybody waiting.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from controlplane.core.traces import SPAN_BYTES, TRACE_BYTES, SpanRecord, SpanRef, update_trace


class Tracer(Protocol):
    """Takes spans that are over."""

    def sampled(self, trace_id: int) -> bool:
        """Whether a trace that begins here, or in another process of the fleet, is recorded."""
        ...

    def emit(self, record: SpanRecord) -> None:
        """Never waits, never raises: what there is no room for is dropped, and counted."""
        ...


@dataclass
class _Process:
    tracer: Tracer | None = None
    others: list[Tracer] = field(default_factory=list)
    """In use too, behind that one: several daemons may live in one process."""


_PROCESS = _Process()


@contextmanager
def use(tracer: Tracer) -> Iterator[None]:
    """It is this process' while the block runs, or until another one is used; afterwards one whose block still runs."""
    if _PROCESS.tracer is not None:
        _PROCESS.others.append(_PROCESS.tracer)
    _PROCESS.tracer = tracer
    try:
        yield
    finally:
        if _PROCESS.tracer is tracer:
            _PROCESS.tracer = _PROCESS.others.pop() if _PROCESS.others else None
        else:
            _PROCESS.others.remove(tracer)


def enabled() -> bool:
    """Somebody takes spans."""
    return _PROCESS.tracer is not None


def emit(record: SpanRecord) -> None:
    """Hand a span over, if it is recorded."""
    tracer = _PROCESS.tracer
    if tracer is not None and decided(record.ref).sampled:
        tracer.emit(record)


def soon(make: Callable[..., None], *account: object) -> None:
    """Have spans made of an account in the loop's next turn, if somebody takes them. A fault in the making is then the
    loop's to log, and never the end of an update, or of what tells of one."""
    if enabled():
        asyncio.get_running_loop().call_soon(make, *account)


def decided(ref: SpanRef) -> SpanRef:
    """The same, and whether it is recorded."""
    if ref.sampled is not None:
        return ref
    tracer = _PROCESS.tracer
    return replace(ref, sampled=tracer is not None and tracer.sampled(ref.trace_id))


def child(parent: SpanRef) -> SpanRef:
    """A new span of the parent's trace."""
    return SpanRef(parent.trace_id, _not_zero(SPAN_BYTES), parent.sampled)


def root() -> SpanRef:
    """The first span of a new trace."""
    return SpanRef(_not_zero(TRACE_BYTES), _not_zero(SPAN_BYTES))


def _not_zero(size: int) -> int:
    return secrets.randbits(8 * size) or 1


def log_fields(run_id: str, update_id: str) -> dict[str, str]:
    """What every line of a log that is about an update has: `update_id`, and the trace's id while there is a tracer."""
    if not enabled() or not update_id:
        return {"update_id": update_id}
    return {"update_id": update_id, "trace_id": f"{update_trace(run_id, update_id):032x}"}


def unix_ns(monotonic: float) -> int:
    """A moment of this process' monotonic clock, as OpenTelemetry dates it."""
    return time.time_ns() - round((time.monotonic() - monotonic) * 1e9)

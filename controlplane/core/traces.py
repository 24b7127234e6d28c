"""Which trace an update is, and which spans of it others may name: derived from its id by a hash.

So every process of a fleet, and each of its lives, adds what it did to one trace, and nothing is carried for that, or
kept over a restart. Also W3C's `traceparent`, for calls whose caller has a trace of its own. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256

TRACE_BYTES = 16
SPAN_BYTES = 8
SAMPLED = 1
"""W3C's flag."""
UPDATE = "update"
"""Of the coordinator, from begin to decision: the root of the trace."""
PUSH = "push"
"""Of the trainer agent, the whole attempt."""
SEND = "send"
"""Of whoever brings the version to one engine."""
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

Value = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class SpanRef:
    """One span of one trace."""

    trace_id: int
    span_id: int
    sampled: bool | None = None
    """Whether it is recorded, where its caller decided that; None: the sampler decides by the trace's id, which gives
    the same answer in every process that has the same sampler."""

    @property
    def traceparent(self) -> str:
        """As W3C writes it; `sampled` must be known."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{SAMPLED if self.sampled else 0:02x}"


class SpanKind(Enum):
    """What a span is to whoever caused it."""

    INTERNAL = "internal"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span."""

    name: str
    at: int
    """Unix time, in nanoseconds."""
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span, as it was: made when it is over."""

    name: str
    ref: SpanRef
    parent: SpanRef | None
    start: int
    """Unix time, in nanoseconds."""
    end: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    error: str = ""
    """ErrorInfo reason of its failure; empty: it did not fail."""
    error_message: str = ""
    kind: SpanKind = SpanKind.INTERNAL
    spoken_for: str = ""
    """Name of a process that this one speaks for, such as `rank-0`; empty: its own."""


def update_trace(run_id: str, update_id: str) -> int:
    """The trace of an update."""
    return int.from_bytes(_digest(run_id, update_id)[:TRACE_BYTES])


def update_span(run_id: str, update_id: str, *path: str) -> SpanRef:
    """The span at `path` of an update's trace, such as `send`, `engine-0`."""
    return SpanRef(update_trace(run_id, update_id), int.from_bytes(_digest(run_id, update_id, *path)[-SPAN_BYTES:]))


def parse_traceparent(text: str) -> SpanRef | None:
    """None: it is none, by W3C's rules, and is to be ignored."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    return SpanRef(trace_id, span_id, bool(int(found[4], 16) & SAMPLED)) if trace_id and span_id else None


def _digest(*words: str) -> bytes:
    """Each word after its length: no two rows of words are one."""
    content = b"".join(len(data).to_bytes(4) + data for data in (word.encode() for word in ("weightplane", *words)))
    return sha256(content).digest()

"""One span for one call that makes tokens, from its beginning to whichever end it has.

Ends are `finished`, `aborted` (by its caller's Abort, or by the engine for an update; `weightplane.abort_cause` says by
whom), `cancelled` (the caller went away), `deadline` (its time was over), `lost` (the engine or another process died),
`refused`, and `failed` by a fault of ours. The caller's own
trace is in the call's metadata, as W3C's `traceparent`; it is handed on also by who has no tracer.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from controlplane.core.errors import DeadlineExceeded, EngineDied, PeerLost, WeightplaneError
from controlplane.core.traces import SpanEvent, SpanKind, SpanRecord, SpanRef, Value, parse_traceparent
from controlplane.tracing.current import child, decided, emit, enabled, root, unix_ns
from weightplane.v1 import rollout_pb2

TRACEPARENT = "traceparent"
MAX_EVENTS = 32
"""Of one call: engines that declined it."""
SOONER_SECONDS = 0.25
"""A caller counts from when it asked, we from when that came: by so much its time may be over sooner than ours."""
_LOST = frozenset({EngineDied.reason, PeerLost.reason})
Metadata = Sequence[tuple[str, str]]


class CallTrace:
    """What is told of one call. Without a tracer all of it is dropped at once; `on` is False."""

    def __init__(self, parent: SpanRef | None, *, on: bool) -> None:
        self.on = on and (parent is None or parent.sampled is not False)
        self._parent = parent
        self._ref = (root() if parent is None else child(parent)) if self.on else parent
        self._began = time.monotonic()
        self._wanted = 1
        self._first: float | None = None
        self._tokens = 0
        self._cached: int | None = None
        self._reasons: list[str] = []
        self._versions: list[str] = []
        self._attributes: dict[str, Value] = {}
        self._events: list[SpanEvent] = []
        self._failure: tuple[str, str] | None = None

    @property
    def metadata(self) -> Metadata:
        """For whoever is asked next on this call's behalf."""
        return () if self._ref is None else ((TRACEPARENT, decided(self._ref).traceparent),)

    def wanted(self, samples: int) -> None:
        """So many samples are one call."""
        if self.on:
            self._wanted = max(samples, 1)

    def entered(self, version: str) -> None:
        """The gate, or an engine, was found: what was waited until here is its time in the queue."""
        self.note({"weightplane.queue_seconds": time.monotonic() - self._began, "weightplane.version": version})

    def made(self, tokens: int) -> None:
        """So many tokens more."""
        if not self.on:
            return
        if tokens and self._first is None:
            self._first = time.monotonic()
        self._tokens += tokens

    def finished(self, reason: str, why: str, spans: Sequence[str], cached_tokens: int | None = None) -> None:
        """A sample of it is whole. `why`: of an abort, such as `aborted` by its caller, `updating` or `poisoned`.
        `spans`: `VERSION:START-END`, each."""
        if not self.on:
            return
        self._reasons.append(reason)
        if why:
            self.note({"weightplane.abort_cause": why})
        self._versions += spans
        if cached_tokens is not None:
            self._cached = (self._cached or 0) + cached_tokens

    def note(self, attributes: Mapping[str, Value]) -> None:
        """Anything else."""
        if self.on:
            self._attributes.update(attributes)

    def happened(self, name: str, attributes: Mapping[str, Value]) -> None:
        """Something that did not end it."""
        if self.on and len(self._events) < MAX_EVENTS:
            self._events.append(SpanEvent(name, time.time_ns(), attributes))

    def failed(self, reason: str, message: str) -> None:
        """It ends with this error, told its caller in another way than by an exception."""
        if self.on:
            self._failure = (reason, message)

    def end(self, name: str, outcome: str, error: str = "", message: str = "") -> None:
        """Once. A call whose samples are all whole has ended well, whatever became of its connection afterwards."""
        if not self.on or self._ref is None:
            return
        if self._failure is not None:
            error, message = self._failure
            outcome = _outcome(error)
        if len(self._reasons) >= self._wanted:
            outcome, error, message = "aborted" if "abort" in self._reasons else "finished", "", ""
        emit(
            SpanRecord(
                name,
                self._ref,
                self._parent,
                unix_ns(self._began),
                time.time_ns(),
                self._attributes | self._usage() | {"weightplane.outcome": outcome},
                tuple(self._events),
                error,
                message,
                SpanKind.SERVER,
            )
        )

    def _usage(self) -> dict[str, Value]:
        said: dict[str, Value] = {"gen_ai.usage.output_tokens": self._tokens}
        if self._reasons:
            said["gen_ai.response.finish_reasons"] = self._reasons
            said["weightplane.spans"] = self._versions
        if self._cached is not None:
            said["gen_ai.usage.cache_read.input_tokens"] = self._cached
        if self._first is not None:
            said["gen_ai.response.time_to_first_chunk"] = self._first - self._began
        return said


UNTRACED = CallTrace(None, on=False)


@contextmanager
def trace_call(
    name: str, parent: SpanRef | None, time_left: Callable[[], float | None] = lambda: None
) -> Iterator[CallTrace]:
    """The span of the block. `time_left`: until the caller's deadline; None: it has none."""
    trace = CallTrace(parent, on=enabled())
    try:
        yield trace
    except (asyncio.CancelledError, GeneratorExit):
        left = time_left()
        if left is not None and left <= SOONER_SECONDS:
            trace.end(name, "deadline", DeadlineExceeded.reason, "the caller's time was over")
        else:
            trace.end(name, "cancelled")
        raise
    except WeightplaneError as error:
        trace.end(name, _outcome(error.reason), error.reason, str(error))
        raise
    except Exception as error:
        trace.end(name, "failed", type(error).__name__)  # what it says may hold anything: the log has it
        raise
    trace.end(name, "finished")


def trace_asked(trace: CallTrace, request: rollout_pb2.GenerateRequest) -> None:
    """What is asked for."""
    trace.wanted(request.sampling.n)
    if trace.on:
        trace.note(
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": request.model,
                "gen_ai.request.max_tokens": request.sampling.max_tokens,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "weightplane.request_id": request.request_id,
            }
        )


def _outcome(reason: str) -> str:
    if reason in _LOST:
        return "lost"
    return "deadline" if reason == DeadlineExceeded.reason else "refused"


def incoming(context: Any) -> SpanRef | None:
    """The caller's span, by the metadata of its call."""
    for key, value in context.invocation_metadata() or ():
        if key == TRACEPARENT and isinstance(value, str):
            return parse_traceparent(value)
    return None


def caller_metadata() -> Metadata:
    """The span that our caller is in, by OpenTelemetry's own word, if the program uses it at all."""
    if "opentelemetry.trace" not in sys.modules:  # nobody began a span then, and nothing is imported for that
        return ()
    from opentelemetry.trace import get_current_span

    span = get_current_span().get_span_context()
    if not span.is_valid:
        return ()
    return ((TRACEPARENT, SpanRef(span.trace_id, span.span_id, span.trace_flags.sampled).traceparent),)

"""What an engine agent did for an update, as spans below the one of whoever sent it.

`receive` is one attempt of a stream, up to where the bytes were in and checked; `install` goes from there to the
canary, and has the parts of the pause below it.
"""

from __future__ import annotations

import time

from controlplane import tracing
from controlplane.core.engine_state import EngineState
from controlplane.core.engine_update import Update
from controlplane.core.errors import WeightplaneError
from controlplane.core.traces import SEND, SpanRecord, SpanRef, Value, update_span
from controlplane.rpc.codec import version_from_proto
from controlplane.rpc.metrics import transport_label
from controlplane.tracing import CallTrace, Phases
from engine_agent.life.requests import Part
from weightplane.v1 import weight_update_pb2


def trace_receive(
    state: EngineState,
    opened: weight_update_pb2.UpdateOpen,
    began: float,
    received: float | None,
    byte_count: int,
    error: tuple[str, str],
) -> None:
    """`received`: when everything was in and checked; None: it never was, for the reason and the cause in `error`."""
    parent = _sent(state, opened.update_id)
    attributes = _of_update(state, opened.update_id, str(version_from_proto(opened.version)))
    attributes["weightplane.transport"] = transport_label(opened.transport)
    attributes["weightplane.bytes"] = byte_count
    attributes["weightplane.term"] = opened.writer_term
    end = time.time_ns() if received is None else tracing.unix_ns(received)
    reason, cause = ("", "") if received is not None else error
    tracing.emit(
        SpanRecord(
            "receive",
            tracing.child(parent),
            parent,
            tracing.unix_ns(began),
            end,
            attributes,
            error=reason,
            error_message=cause,
        )
    )


def trace_install(state: EngineState, update: Update, phases: Phases, error: BaseException | None) -> None:
    """One install, and its phases; the last of them is the one that failed."""
    parent = _sent(state, update.update_id)
    ref = tracing.child(parent)
    attributes = _of_update(state, update.update_id, str(update.version))
    attributes["weightplane.term"] = update.writer_term
    attributes["weightplane.bytes"] = update.byte_count
    attributes["weightplane.apply"] = "streaming" if update.streaming else "staged"
    reason, cause = _told(error)
    start, end = tracing.unix_ns(phases.began), time.time_ns()
    tracing.emit(SpanRecord("install", ref, parent, start, end, attributes, error=reason, error_message=cause))
    for phase in phases.done:
        failed = reason if phase is phases.done[-1] else ""
        start, end = tracing.unix_ns(phase.start), tracing.unix_ns(phase.end)
        tracing.emit(SpanRecord(phase.name, tracing.child(ref), ref, start, end, error=failed))


def _told(error: BaseException | None) -> tuple[str, str]:
    """Reason and cause. What an exception that is none of ours says may hold anything: the log has it."""
    if isinstance(error, WeightplaneError):
        return error.reason, str(error)
    return ("", "") if error is None else (type(error).__name__, "")


def trace_part(trace: CallTrace, part: Part) -> None:
    """A part of a sample, as it is handed on."""
    if not trace.on:
        return
    trace.made(len(part.delta.token_ids))
    reason = part.delta.finish_reason
    if reason is not None:
        spans = [f"{s.version}:{s.start}-{s.end}" for s in part.spans]
        why = part.delta.stop_reason if reason == "abort" else ""
        trace.finished(reason, why, spans, part.delta.cached_prompt_tokens)


def _sent(state: EngineState, update_id: str) -> SpanRef:
    """The sender's span, whoever that is; decided once for all below it."""
    return tracing.decided(update_span(state.run_id, update_id, SEND, state.engine_id))


def _of_update(state: EngineState, update_id: str, version: str) -> dict[str, Value]:
    return {
        "weightplane.update_id": update_id,
        "weightplane.version": version,
        "weightplane.engine_id": state.engine_id,
        "weightplane.incarnation": state.incarnation,
    }

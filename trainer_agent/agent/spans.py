"""What a trainer agent and its ranks did for an update, as spans below the coordinator's.

Ranks say their times over the local socket and the agent makes the spans: an exporter would be gRPC, which no training
process has.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from controlplane import tracing
from controlplane.core.errors import WeightplaneError
from controlplane.core.traces import PUSH, SEND, UPDATE, SpanRecord, Value, update_span, update_trace
from controlplane.rpc.codec import version_from_proto
from controlplane.rpc.metrics import transport_label
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, version_pb2


@dataclass(frozen=True, slots=True)
class Of:
    """Which update."""

    run_id: str
    update_id: str
    version: version_pb2.WeightVersion
    term: int

    @property
    def attributes(self) -> dict[str, Value]:
        return {
            "weightplane.update_id": self.update_id,
            "weightplane.version": str(version_from_proto(self.version)),
            "weightplane.term": self.term,
        }


def traced(run_id: str, update_id: str) -> str:
    """What ranks are told, so that they say their times and log the trace's id; empty: nobody wants that."""
    return f"{update_trace(run_id, update_id):032x}" if tracing.enabled() else ""


def trace_push(of: Of, step: int, started: float, planned: float, result: rank_pb2.PushResult) -> None:
    """One attempt, from before its begin to its end, and below it `plan`: until the coordinator had said who sends
    what. Monotonic seconds."""
    ref = tracing.decided(update_span(of.run_id, of.update_id, PUSH))
    start, end = tracing.unix_ns(started), time.time_ns()
    attributes = of.attributes | {"weightplane.step": step}
    root = update_span(of.run_id, of.update_id, UPDATE)
    tracing.emit(
        SpanRecord(
            "push",
            ref,
            root,
            start,
            end,
            attributes | {"weightplane.retry": result.retry},
            error=result.error_reason,
            error_message=result.error_message,
        )
    )
    tracing.emit(SpanRecord("plan", tracing.child(ref), ref, start, tracing.unix_ns(planned), attributes))


def trace_send(
    of: Of,
    assignment: fleet_pb2.Assignment,
    began: float,
    byte_count: int,
    attempts: int,
    error: WeightplaneError | None,
) -> None:
    """One engine's stream, all attempts of it, until it said `applied` or the stream was given up."""
    engine_id = assignment.engine.engine_id
    attributes = of.attributes | {
        "weightplane.engine_id": engine_id,
        "weightplane.transport": transport_label(assignment.transport),
        "weightplane.required": assignment.required,
        "weightplane.bytes": byte_count,
        "weightplane.attempts": attempts,
    }
    tracing.emit(
        SpanRecord(
            "send",
            update_span(of.run_id, of.update_id, SEND, engine_id),
            update_span(of.run_id, of.update_id, PUSH),
            tracing.unix_ns(began),
            time.time_ns(),
            attributes,
            error="" if error is None else error.reason,
            error_message="" if error is None else str(error),
        )
    )


def trace_rank(run_id: str, rank: int, times: rank_pb2.PushTimes) -> None:
    """What one rank said of its part."""
    parent = tracing.decided(update_span(run_id, times.update_id, PUSH))
    ref, name = tracing.child(parent), f"rank-{rank}"
    attributes: dict[str, Value] = {
        "weightplane.update_id": times.update_id,
        "weightplane.rank": rank,
        "weightplane.bytes": times.byte_count,
        "weightplane.source_seconds": times.source_seconds,
    }
    whole, reason = times.whole, times.error_reason
    span = (whole.start_unix_nanos, whole.end_unix_nanos, attributes)
    tracing.emit(SpanRecord("rank", ref, parent, *span, error=reason, spoken_for=name))
    for one in times.stretches:
        last = reason if one is times.stretches[-1] else ""
        below = (tracing.child(ref), ref, one.start_unix_nanos, one.end_unix_nanos)
        tracing.emit(SpanRecord(one.name, *below, error=last, spoken_for=name))

"""A collector of spans that speaks OTLP over gRPC, by OpenTelemetry's own service; and a tracer in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from controlplane import tracing
from controlplane.core.traces import SpanRecord


@dataclass(frozen=True)
class Received:
    """One span, as it came."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it is a root."""
    service: str
    instance: str
    """Of which process it is."""
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    error: bool
    status: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all of them."""

    def __init__(self) -> None:
        self.spans: list[Received] = []

    async def Export(self, request: Any, context: Any) -> Any:
        self.spans += _received(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace_id: str) -> list[Received]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def tree(self, trace_id: str) -> str:
        """For people."""
        return "\n".join(_branch(self.of(trace_id), "", 0))


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    """A running one, and its endpoint."""
    servicer, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


@dataclass
class Kept:
    """A tracer that keeps what it is handed."""

    records: list[SpanRecord] = field(default_factory=list)
    keeps: bool = True
    """What its sampler says."""

    def sampled(self, trace_id: int) -> bool:
        return self.keeps

    def emit(self, record: SpanRecord) -> None:
        self.records.append(record)

    def named(self, name: str) -> list[SpanRecord]:
        return [record for record in self.records if record.name == name]


@contextmanager
def kept_spans() -> Iterator[Kept]:
    """This process' spans, while the block runs."""
    kept = Kept()
    with tracing.use(kept):
        yield kept


def _received(request: Any) -> Iterator[Received]:
    for of_process in request.resource_spans:
        process = _values(of_process.resource.attributes)
        for scope in of_process.scope_spans:
            for span in scope.spans:
                yield Received(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    service=process.get("service.name", ""),
                    instance=process.get("service.instance.id", ""),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    events=[(e.name, _values(e.attributes)) for e in span.events],
                    error=span.status.code == span.status.STATUS_CODE_ERROR,
                    status=span.status.message,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: _value(a.value) for a in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _branch(spans: list[Received], parent: str, depth: int) -> Iterator[str]:
    for span in sorted((s for s in spans if s.parent_id == parent), key=lambda s: s.start):
        took = f"{(span.end - span.start) / 1e6:9.1f} ms"
        name = f"{'  ' * depth}{span.name}"
        who = f"{span.service.removeprefix('weightplane-')} {span.instance}"
        yield f"{took}  {name:<22}{who:<34}{'ERROR ' + span.status if span.error else ''}".rstrip()
        yield from _branch(spans, span.span_id, depth + 1)

"""Spans on their way to a collector: OpenTelemetry's SDK and its OTLP exporter over gRPC, an extra.

Promises: the SDK's global provider is left alone, since what runs beside us (vLLM) may have its own; a span waits in
the SDK's bounded queue, in memory, and a thread of the SDK's sends it, so a collector that is slow or gone costs spans
and nothing else; the end of the process waits for it no longer than `flush_seconds`. Nothing of the SDK is imported
before tracing is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog

from controlplane.core.traces import SpanKind, SpanRecord
from controlplane.rpc.metrics import SPANS
from controlplane.tracing.current import use
from controlplane.tracing.settings import HOW_TO_GET_IT, TracingSettings, installed

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = structlog.get_logger(__name__)

SCOPE = "weightplane"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
MAX_SPOKEN_FOR = 1024
"""Processes that one process speaks for: ranks of a node."""
SAYS_AGAIN_SECONDS = 60.0
"""How often the log says that spans do not reach the collector."""
LIBRARIES = ("opentelemetry.exporter.otlp", "opentelemetry.sdk.trace", "opentelemetry.sdk._shared_internal")


def wanted(settings: TracingSettings, environment: Mapping[str, str] = os.environ) -> bool:
    """By the settings, else by OpenTelemetry's variables; OTEL_SDK_DISABLED=true goes over both."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if settings.enabled is not None:
        return settings.enabled
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporter == "otlp" or (not exporter and any(environment.get(name) for name in ENDPOINTS))


@asynccontextmanager
async def sending_spans(
    settings: TracingSettings, component: str, instance: str, run_id: str = ""
) -> AsyncIterator[None]:
    """While the block runs this process' spans go to the collector, if that is wanted. `component` is coordinator,
    engine or trainer, `instance` which of them."""
    if not wanted(settings):
        yield
        return
    try:
        tracer = _made(settings, {"component": component, "instance": instance, "run_id": run_id})
    except Exception as error:  # the variables may be meant for another program, and are no reason not to serve
        log.warning("tracing_unavailable", cause=str(error))
        yield
        return
    log.info("tracing_began", component=component)
    try:
        with use(tracer):
            try:
                yield
            finally:
                await asyncio.sleep(0)  # what is to be made `soon` is made
    finally:
        await asyncio.to_thread(tracer.close, settings.flush_seconds)


def _made(settings: TracingSettings, process: Mapping[str, str]) -> OtlpTracer:
    """Raises ValueError, and whatever the SDK says of variables that it cannot use."""
    if not installed():
        raise ValueError(HOW_TO_GET_IT)
    protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "grpc")
    if protocol != "grpc" and not settings.endpoint:
        raise ValueError(f"spans go by OTLP over gRPC, not by {protocol}: set tracing.endpoint")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    _hear_the_libraries()
    return OtlpTracer(OTLPSpanExporter(endpoint=settings.endpoint or None), process)


class OtlpTracer:
    """The SDK as a `Tracer`."""

    def __init__(self, exporter: SpanExporter, process: Mapping[str, str]) -> None:
        """`process`: component, instance and run_id of this one."""
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._process = process
        self._processor = BatchSpanProcessor(_counted(exporter))
        self._ids = _ids()
        self._providers: dict[str, TracerProvider] = {}
        self._sampler = self._provider("").sampler

    def sampled(self, trace_id: int) -> bool:
        return bool(self._sampler.should_sample(None, trace_id, "").decision.is_sampled())  # type: ignore[no-untyped-call]

    def emit(self, record: SpanRecord) -> None:
        from opentelemetry.trace import SpanKind as Kind
        from opentelemetry.trace import Status, StatusCode

        SPANS.labels("made").inc()
        self._ids.next = record.ref
        span = (
            self._provider(record.spoken_for)
            .get_tracer(SCOPE)
            .start_span(
                record.name,
                context=_parent(record),
                kind=Kind.SERVER if record.kind is SpanKind.SERVER else Kind.INTERNAL,
                attributes=dict(record.attributes),
                start_time=record.start,
            )
        )
        for event in record.events:
            span.add_event(event.name, dict(event.attributes), event.at)
        if record.error:
            span.set_attribute("error.type", record.error)
            text = f"{record.error}: {record.error_message}" if record.error_message else record.error
            span.set_status(Status(StatusCode.ERROR, text))
        span.end(record.end)

    def close(self, seconds: float) -> None:
        """Send what waits, for so long at most; the rest is dropped."""
        began = time.monotonic()
        # The SDK's own limit bounds each of its steps, not their sum.
        ending = threading.Thread(target=self._processor.shutdown, name="weightplane-tracing-end", daemon=True)
        ending.start()
        ending.join(seconds)
        log.info("tracing_ended", seconds=round(time.monotonic() - began, 3), whole=not ending.is_alive())

    def _provider(self, spoken_for: str) -> TracerProvider:
        """One for each process that spans are of: that is what tells them apart."""
        provider = self._providers.get(spoken_for)
        if provider is None:
            if len(self._providers) > MAX_SPOKEN_FOR:
                return self._providers[""]
            provider = self._providers[spoken_for] = self._new_provider(spoken_for)
        return provider

    def _new_provider(self, spoken_for: str) -> TracerProvider:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        component = spoken_for.partition("-")[0] or self._process["component"]
        instance = "/".join(part for part in (self._process["instance"], spoken_for) if part)
        ours = {"service.instance.id": instance, "weightplane.component": component}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            ours["service.name"] = f"weightplane-{component}"
        if self._process["run_id"]:
            ours["weightplane.run_id"] = self._process["run_id"]
        resource = Resource.create(ours)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(self._processor)
        return provider


def _parent(record: SpanRecord) -> Any:
    """The SDK's context of a span whose parent may be any process'."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    parent = record.parent
    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED)  # what is not sampled was never handed over
    above = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(above), Context())


def _ids() -> Any:
    """The SDK draws ids where a span begins; ours are known before."""
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Given(IdGenerator):
        next: Any = None

        def generate_trace_id(self) -> int:
            return int(self.next.trace_id)

        def generate_span_id(self) -> int:
            return int(self.next.span_id)

    return Given()


def _counted(exporter: SpanExporter) -> SpanExporter:
    """The same, and counted: `made` less `sent` and `failed` wait, or were dropped."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Counted(SpanExporter):
        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            result = exporter.export(spans)
            SPANS.labels("sent" if result is SpanExportResult.SUCCESS else "failed").inc(len(spans))
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Counted()


class _ToOurLog(logging.Handler):
    """The libraries' own complaints, as events of ours, and not more often than anybody reads them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SAYS_AGAIN_SECONDS
            log.warning("tracing_failed", cause=record.getMessage())


_TO_OUR_LOG = _ToOurLog()


def _hear_the_libraries() -> None:
    """From here on, also of a thread of theirs that outlives our last span."""
    for name in LIBRARIES:
        library = logging.getLogger(name)
        library.addHandler(_TO_OUR_LOG)  # once, however often
        library.propagate = False

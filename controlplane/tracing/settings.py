"""Whether and where a daemon sends its spans."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

HOW_TO_GET_IT = "tracing needs OpenTelemetry's SDK and its OTLP exporter: pip install 'weightplane[otel]'"


def installed() -> bool:
    """The extra is there."""
    try:
        return all(find_spec(name) for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"))
    except ModuleNotFoundError:  # of a package above
        return False


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """The table `[tracing]`. What it leaves open is said by OpenTelemetry's own variables, `OTEL_…`."""

    enabled: bool | None = None
    """Send spans. Absent: if OTEL_TRACES_EXPORTER is otlp, or an OTEL_EXPORTER_OTLP endpoint is set."""
    endpoint: str = ""
    """Of a collector that speaks OTLP over gRPC, such as http://collector:4317; https is TLS. Empty:
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4317."""
    flush_seconds: float = 3.0
    """At the end of the daemon: how long the spans that wait may take to the collector; then they are dropped."""

    def __post_init__(self) -> None:
        if self.enabled and not installed():
            raise ValueError(HOW_TO_GET_IT)
        if self.flush_seconds < 0:
            raise ValueError(f"flush_seconds is at least 0, not {self.flush_seconds}")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint begins with http:// or https://, not {self.endpoint!r}")


BY_ENVIRONMENT = TracingSettings()

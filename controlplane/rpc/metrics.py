"""Metrics of this process, in Prometheus' form. Labels are bounded: methods and reasons, never versions or ids."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, start_http_server

REFUSALS = Counter("weightplane_refusals", "Calls that ended with a typed error.", ["method", "reason"])
INTERNAL_ERRORS = Counter(
    "weightplane_internal_errors", "Calls that ended with an error nobody planned for.", ["method"]
)
APPLIED_NUMBER = Gauge(
    "weightplane_engine_applied_number", "Number of the version that an engine holds; -1 is unset.", ["engine"]
)
SERVED_NUMBER = Gauge(
    "weightplane_model_served_number", "Highest number that the fleet serves of a model; -1 is none.", ["model"]
)


def serve_metrics(listen: str) -> None:
    """Answer GET /metrics at host:port, in a thread of its own. Does nothing if `listen` is empty.

    Raises:
        OSError: the address cannot be bound.
    """
    if listen:
        host, _, port = listen.rpartition(":")
        start_http_server(int(port), addr=host.strip("[]"))

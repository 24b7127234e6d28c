"""Metrics of this process, in Prometheus' form. Labels are bounded: methods and reasons, never versions or ids."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, start_http_server

from controlplane.rpc.addresses import split_address
from controlplane.rpc.security.settings import PLAIN, TlsSettings

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


def serve_metrics(listen: str, tls: TlsSettings = PLAIN) -> None:
    """Answer GET /metrics at host:port, in a thread of its own. Does nothing if `listen` is empty.

    With a certificate it speaks TLS, and asks for one unless tokens are what callers show elsewhere.

    Raises:
        OSError: the address cannot be bound.
    """
    if not listen:
        return
    host, port = split_address(listen)
    if not tls.serves_tls:
        start_http_server(port, addr=host)
        return
    files = {"certfile": str(tls.cert), "keyfile": str(tls.key), "client_cafile": str(tls.ca)}
    start_http_server(port, addr=host, client_auth_required=tls.tokens is None, **files)  # type: ignore[arg-type]

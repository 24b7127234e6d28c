"""Metrics of this process, in Prometheus' form. Labels are bounded: methods, reasons, phases, parts; names of engines
and trainers only of those that are there; never versions or ids of updates.

Every name is documented in docs/metrics.md, which is made from what stands here and in the collectors beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from controlplane.rpc.addresses import split_address
from controlplane.rpc.enum_words import word_of
from controlplane.rpc.lag_histogram import LagHistogram
from controlplane.rpc.ports import PortUnavailable
from controlplane.rpc.security.settings import PLAIN, TlsSettings
from weightplane.v1 import weight_update_pb2

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Buckets: from a round trip on one host to the longest limits."""
LOOP_SECONDS = 0.25
"""How often a daemon looks whether its event loop keeps up."""


REFUSALS = Counter("weightplane_refusals", "Calls that ended with a typed error.", ["method", "reason"])
INTERNAL_ERRORS = Counter(
    "weightplane_internal_errors", "Calls that ended with an error nobody planned for.", ["method"]
)
LOOP_LAG = Histogram(
    "weightplane_event_loop_lag_seconds",
    "How much later than asked the daemon's event loop woke a sleeper.",
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
SPANS = Counter(
    "weightplane_spans",
    "OpenTelemetry spans: made, sent to the collector, failed there. Others wait, or found the queue full.",
    ["outcome"],
)
UPDATES = Counter("weightplane_updates", "Updates that the coordinator decided.", ["model", "phase"])
UPDATE_PHASE_SECONDS = Histogram(
    "weightplane_update_phase_seconds",
    "How long an update was preparing (from begin to go), and going (from go to the decision).",
    ["model", "phase"],
    buckets=SECONDS,
)
RECEIVED_BYTES = Counter(
    "weightplane_received_bytes", "Bytes of weights that came to this engine and were checked.", ["transport"]
)
INSTALLS = Counter(
    "weightplane_installs", "Installs on this engine: applied, or the reason that they ended with.", ["outcome"]
)
PAUSE_SECONDS = Histogram(
    "weightplane_pause_seconds",
    "How long an install took, by part: all but `wait` is time in which nothing was generated.",
    ["part"],
    buckets=SECONDS,
)
PAUSE_PARTS = ("wait", "quiesce", "install", "caches", "canary")
TOKEN_LAG = LagHistogram(
    "weightplane_token_lag_commits",
    "How many fleet commits the version of each token that this engine made was behind then.",
)
SENT_BYTES = Counter("weightplane_sent_bytes", "Bytes of weights that this trainer's ranks sent.", ["transport"])
PUSHES = Counter("weightplane_pushes", "Attempts to push: committed, degraded, or the reason of the end.", ["outcome"])
PUSH_SECONDS = Histogram(
    "weightplane_push_seconds", "How long an attempt to push took, from begin to its end.", buckets=SECONDS
)


def transport_label(transport: weight_update_pb2.Transport.ValueType) -> str:
    """As transports are called everywhere."""
    return word_of(weight_update_pb2.Transport, transport)


def serve_metrics(listen: str, *collectors: Collector, tls: TlsSettings = PLAIN) -> Callable[[], None]:
    """Answer GET /metrics at host:port with this process' metrics and those of `collectors`, in a thread of its own.
    Does nothing if `listen` is empty. What is returned ends it.

    With a certificate it speaks TLS, and asks for one unless tokens are what callers show elsewhere.

    Raises:
        PortUnavailable: with the address.
    """
    if not listen:
        return lambda: None
    registry = CollectorRegistry()
    for collector in (_OfProcess(), *collectors):
        registry.register(collector)
    host, port = split_address(listen)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry, **_certificates(tls))
    except OSError as error:
        raise PortUnavailable(f"cannot serve metrics on {listen}: {error.strerror or error}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _certificates(tls: TlsSettings) -> dict[str, Any]:
    if not tls.serves_tls:
        return {}
    files = {"certfile": str(tls.cert), "keyfile": str(tls.key), "client_cafile": str(tls.ca)}
    return {**files, "client_auth_required": tls.tokens is None}


class _OfProcess(Collector):
    """What the whole process counts, whichever of its parts did."""

    def collect(self) -> Iterable[Metric]:
        return REGISTRY.collect()

    def describe(self) -> Iterable[Metric]:
        return ()


async def watch_loop() -> None:
    """Measure how late this event loop wakes a sleeper, for ever."""
    while True:
        asked = time.monotonic() + LOOP_SECONDS
        await asyncio.sleep(LOOP_SECONDS)
        LOOP_LAG.observe(max(0.0, time.monotonic() - asked))

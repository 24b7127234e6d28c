"""A histogram of lags, in fleet commits, that counts many tokens at once: the library's observes one value at a time.

Buckets are few and fixed, and models those of one process: the series are bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from controlplane.core.lag import LAG_BINS

LABELS = ("model",)


class LagHistogram(Collector):
    """Of one process."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._name, self._text = name, text
        self._lock = threading.Lock()
        self._bins: dict[str, list[int]] = {}
        self._sums: dict[str, int] = {}
        self._labelnames = LABELS
        registry.register(self)

    def count(self, model: str, lag: int, tokens: int) -> None:
        """So many tokens of that lag."""
        with self._lock:
            self._bins.setdefault(model, [0] * LAG_BINS)[min(lag, LAG_BINS - 1)] += tokens
            self._sums[model] = self._sums.get(model, 0) + lag * tokens

    def collect(self) -> Iterable[Metric]:
        family = lag_family(self._name, self._text)
        with self._lock:
            for model, bins in self._bins.items():
                family.add_metric([model], lag_buckets(bins), self._sums[model])
        return [family]

    def describe(self) -> Iterable[Metric]:
        return [lag_family(self._name, self._text)]


def lag_family(name: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, labels=LABELS)


def lag_buckets(bins: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them: the last bin has all that is greater, too."""
    edges = [*(f"{float(i)}" for i in range(LAG_BINS - 1)), "+Inf"]
    return [(edge, float(sum(bins[: i + 1]))) for i, edge in enumerate(edges)]

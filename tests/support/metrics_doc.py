"""docs/metrics.md, from the metrics themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from controlplane.coordinator import metrics as coordinator
from controlplane.rpc import metrics as shared
from controlplane.rpc.lag_histogram import LABELS, LagHistogram
from engine_agent.daemon import metrics as engine
from trainer_agent.agent import metrics as trainer

HEAD = """# Metrics

Each daemon answers `GET /metrics` in Prometheus' form at its setting `metrics_listen` (`127.0.0.1:9100`, say; empty: it
does not). `deploy/prometheus/alerts.yml` has alert rules, `deploy/grafana/dashboard.json` a dashboard; both use nothing
but what is listed here.

Labels are bounded: methods, reasons, phases, parts, transports, and the names of engines, trainers and models that are
there. Versions and updates' ids are never labels: a number is a value.

A metric of an engine is there while the engine is. Of one that is UNKNOWN, what it holds is not told (INV-8); only
`engine_known`, `engine_routable` and `engine_report_age_seconds` are.

This page is made from the code (`WEIGHTPLANE_UPDATE_GOLDEN=1 pytest tests/unit/test_dashboards.py`).
"""
OF_ENGINES = ("received_bytes", "installs", "pause_seconds", "token_lag_commits")
OF_TRAINERS = ("sent_bytes", "pushes", "push_seconds")
OF_COORDINATORS = ("updates", "update_phase_seconds")


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


LAGS = Row(coordinator.LAG_HISTOGRAM[0], "histogram", LABELS, coordinator.LAG_HISTOGRAM[1])


def rendered() -> str:
    counted = {row.name: row for row in _shared()}
    parts = [
        ("The coordinator", [*_gauges(coordinator.FAMILIES), *_named(counted, OF_COORDINATORS), LAGS]),
        ("Engine agents", [*_gauges(engine.FAMILIES), *_named(counted, OF_ENGINES)]),
        ("Trainer agents", [*_gauges(trainer.FAMILIES), *_named(counted, OF_TRAINERS)]),
    ]
    parts.append(("Every daemon", list(counted.values())))
    return HEAD + "".join(f"\n## {title}\n\n{_table(rows)}" for title, rows in parts)


def names() -> set[str]:
    """As Prometheus stores them, histograms' parts too."""
    found = {f"weightplane_{n}" for n in (*coordinator.FAMILIES, *engine.FAMILIES, *trainer.FAMILIES)}
    for row in (*_shared(), LAGS):
        base = f"weightplane_{row.name}"
        found |= {f"{base}_{p}" for p in ("bucket", "sum", "count")} if row.kind == "histogram" else {f"{base}_total"}
    return found


def _shared() -> Iterator[Row]:
    for metric in vars(shared).values():
        if isinstance(metric, (MetricWrapperBase, LagHistogram)):
            (family,) = metric.describe()
            yield Row(family.name.removeprefix("weightplane_"), family.type, metric._labelnames, family.documentation)


def _gauges(families: Mapping[str, Any]) -> Iterator[Row]:
    for name, said in families.items():
        text, labels = (said, ()) if isinstance(said, str) else said
        yield Row(name, "gauge", labels, text)


def _named(counted: dict[str, Row], wanted: Iterable[str]) -> list[Row]:
    return [counted.pop(name) for name in wanted]


def _table(rows: Iterable[Row]) -> str:
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for row in rows:
        suffix = "_total" if row.kind == "counter" else ""
        labels = ", ".join(row.labels)
        lines.append(f"| `weightplane_{row.name}{suffix}` | {row.kind} | {labels} | {row.text} |")
    return "\n".join(lines) + "\n"

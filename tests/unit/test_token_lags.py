"""Lag of tokens: summed by model over every life, each token once, and told as a histogram that Prometheus reads."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from controlplane.coordinator.metrics import FleetMetrics
from controlplane.coordinator.token_lags import TokenLags
from controlplane.core.lag import LAG_BINS
from controlplane.rpc.lag_histogram import LagHistogram
from weightplane.v1 import engine_pb2, operator_pb2, version_pb2


def view(*engines: tuple[str, str, list[int]], model: str = "policy") -> operator_pb2.FleetView:
    made = operator_pb2.FleetView()
    for name, life, counts in engines:
        ref = version_pb2.EngineRef(engine_id=name, incarnation=life)
        made.engines.add(status=engine_pb2.EngineStatus(engine=ref, model=model, tokens_by_lag=counts))
    return made


def told(lags: TokenLags, seen: operator_pb2.FleetView) -> dict[str, list[int]]:
    lags.see(seen)
    return {of.model: list(of.tokens_by_lag) for of in seen.token_lags}


def bins(*head: int) -> list[int]:
    return [*head, *[0] * (LAG_BINS - len(head))]


def test_a_report_that_comes_twice_counts_once_and_a_life_that_ended_still_counts() -> None:
    lags = TokenLags()
    assert told(lags, view(("e0", "a", bins(5, 1)), ("e1", "b", bins(2)))) == {"policy": bins(7, 1)}
    assert told(lags, view(("e0", "a", bins(5, 1)), ("e1", "b", bins(4)))) == {"policy": bins(9, 1)}
    assert told(lags, view(("e0", "next", bins(3)))) == {"policy": bins(12, 1)}
    assert told(lags, view()) == {"policy": bins(12, 1)}
    assert told(lags, view(("e1", "b", bins(4)))) == {"policy": bins(12, 1)}


def test_a_report_that_comes_late_takes_nothing_back_and_is_not_counted_again() -> None:
    lags = TokenLags()
    told(lags, view(("e0", "a", bins(10))))
    assert told(lags, view(("e0", "a", bins(4)))) == {"policy": bins(10)}
    assert told(lags, view(("e0", "a", bins(11)))) == {"policy": bins(11)}


def test_models_are_apart_and_lags_of_an_engine_that_counts_further_are_among_the_last() -> None:
    lags = TokenLags()
    told(lags, view(("t0", "a", [1] * (LAG_BINS + 3)), model="teacher"))
    assert told(lags, view(("e0", "a", [2]))) == {"policy": bins(2), "teacher": [*[1] * (LAG_BINS - 1), 4]}


def samples(registry: CollectorRegistry, name: str) -> dict[tuple[str, str], float]:
    """By what it is and its bucket."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    (family,) = [f for f in families if f.name == name]
    assert family.type == "histogram"
    return {(s.name.removeprefix(f"{name}_"), s.labels.get("le", "")): s.value for s in family.samples}


def test_an_engine_agents_histogram_is_cumulative_bounded_and_sums_what_lies_above_its_buckets() -> None:
    registry = CollectorRegistry()
    lag = LagHistogram("weightplane_test_lag", "text", registry)
    for behind, tokens in ((0, 10), (2, 5), (100, 1)):
        lag.count("policy", behind, tokens)
    found = samples(registry, "weightplane_test_lag")
    assert [found["bucket", edge] for edge in ("0.0", "1.0", "2.0", "7.0", "+Inf")] == [10, 10, 15, 15, 16]
    assert (found["count", ""], found["sum", ""]) == (16, 110)
    assert len(found) == LAG_BINS + 2


def test_the_coordinators_histogram_is_of_all_engines() -> None:
    seen, lags, registry = view(("e0", "a", bins(5, 1)), ("e1", "b", bins(2))), TokenLags(), CollectorRegistry()
    lags.see(seen)
    registry.register(FleetMetrics(lambda: seen, lambda: 0.0))
    found = samples(registry, "weightplane_model_token_lag_commits")
    assert (found["bucket", "0.0"], found["bucket", "+Inf"], found["count", ""], found["sum", ""]) == (7, 8, 8, 1)

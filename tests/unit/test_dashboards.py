"""Metrics are documented, and what watches them uses nothing else; promtool's word on all of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from controlplane.coordinator.metrics import FleetMetrics
from controlplane.core.engine_state import Hold, HoldKind
from controlplane.rpc.metrics import _OfProcess, serve_metrics
from controlplane.rpc.ports import PortUnavailable
from tests.support import metrics_doc
from tests.support.ports import free_port
from tests.support.scripted_fleet import STARTED_AT, ScriptedFleet, poisoned
from weightplane.v1 import operator_pb2

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"
NAME = re.compile(r"weightplane_\w+")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt install prometheus")


def promtool(*words: str, given: str = "") -> str:
    ended = subprocess.run(
        ["promtool", *words], input=given, capture_output=True, text=True, timeout=150, check=False, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def exposed(view: operator_pb2.FleetView, now: float = STARTED_AT) -> str:
    registry = CollectorRegistry()
    registry.register(_OfProcess())
    registry.register(FleetMetrics(lambda: view, lambda: now))
    return generate_latest(registry).decode()


def dashboard_queries() -> list[str]:
    board: Any = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_every_metric_is_documented() -> None:
    page = ROOT / "docs" / "metrics.md"
    if os.environ.get("WEIGHTPLANE_UPDATE_GOLDEN"):
        page.write_text(metrics_doc.rendered())
    assert page.read_text() == metrics_doc.rendered()


def test_alerts_and_dashboard_use_what_there_is() -> None:
    rules = [r for g in yaml.safe_load(ALERTS.read_text())["groups"] for r in g["rules"]]
    queries = [r["expr"] for r in rules] + dashboard_queries()
    used = {name for query in queries for name in NAME.findall(query)}
    assert used - metrics_doc.names() == set()
    assert all({"summary", "action"} == set(r["annotations"]) for r in rules)


@needs_promtool
def test_the_alerts_are_rules_and_fire_when_they_should() -> None:
    promtool("check", "rules", str(ALERTS))
    assert "SUCCESS" in promtool("test", "rules", "tests/prometheus/alerts_test.yml")


@needs_promtool
def test_the_dashboards_queries_are_queries(tmp_path: Path) -> None:
    filled = [q.replace("$__rate_interval", "5m").replace("$job", ".*") for q in dashboard_queries()]
    rules = [{"record": f"panel:{i}", "expr": query} for i, query in enumerate(filled)]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(file))


@needs_promtool
def test_what_is_exposed_is_well_formed() -> None:
    promtool("check", "metrics", given=exposed(poisoned()))


def test_inv8_of_an_unknown_engine_nothing_is_told_but_that() -> None:
    text = exposed(poisoned())
    of_unknown = {line.partition("{")[0] for line in text.splitlines() if 'engine="engine-5"' in line}
    assert of_unknown == {f"weightplane_engine_{n}" for n in ("known", "routable", "report_age_seconds")}
    assert 'weightplane_engine_known{engine="engine-5"} 0.0' in text
    assert 'weightplane_engine_poisoned{engine="engine-2"} 1.0' in text
    assert 'weightplane_engine_applied_number{engine="engine-2"} -1.0' in text


def test_an_engine_that_left_has_no_metric_any_more() -> None:
    fleet = ScriptedFleet(2)
    fleet.push(1)
    assert 'engine="engine-1"' in exposed(fleet.view())
    fleet.leave("engine-1")
    assert 'engine="engine-1"' not in exposed(fleet.view())


def test_an_open_update_ages_and_a_decided_one_does_not() -> None:
    fleet = ScriptedFleet(1)
    fleet.begin(1)
    name = 'weightplane_model_update_open_seconds{model="policy"}'
    assert f"{name} 30.0" in exposed(fleet.view(), STARTED_AT + 30)
    fleet = ScriptedFleet(1)
    fleet.push(1)
    assert f"{name} 0.0" in exposed(fleet.view(), STARTED_AT + 30)


def test_lag_gate_and_lease_are_the_views_own() -> None:
    fleet = ScriptedFleet(2)
    fleet.push(1)
    fleet.report("engine-0", holds=frozenset({Hold(HoldKind.OPERATOR, "ann")}))
    text = exposed(fleet.view(), STARTED_AT + fleet.now)
    assert 'weightplane_engine_lag_commits{engine="engine-0"} 0.0' in text
    assert 'weightplane_engine_gate_open{engine="engine-0"} 0.0' in text
    assert 'weightplane_engine_gate_open{engine="engine-1"} 1.0' in text
    (lease,) = [line for line in text.splitlines() if line.startswith("weightplane_trainer_lease_seconds{")]
    assert 0 < float(lease.rpartition(" ")[2]) <= 10


def test_a_taken_address_for_metrics_is_told_as_any_other() -> None:
    address = f"127.0.0.1:{free_port()}"
    stop = serve_metrics(address)
    try:
        with pytest.raises(PortUnavailable, match=address):
            serve_metrics(address)
    finally:
        stop()
    serve_metrics(address)()

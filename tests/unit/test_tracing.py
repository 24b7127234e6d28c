"""Tracing in one process: off by default, what settings and variables say, and what becomes of each call."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from controlplane import tracing
from controlplane.config import ConfigError, load, load_values
from controlplane.coordinator.daemon import CoordinatorSettings
from controlplane.core.errors import EngineDied, EnginePoisoned
from controlplane.core.traces import SpanEvent, SpanKind, SpanRecord, SpanRef, parse_traceparent, update_span
from controlplane.tracing import Phases, TracingSettings, caller_metadata, sending_spans, trace_call
from controlplane.tracing import settings as settings_module
from controlplane.tracing.otlp import OtlpTracer, wanted
from tests.support.otlp_collector import Kept, kept_spans
from tests.support.ports import free_port

PROCESS = {"component": "engine", "instance": "engine-0", "run_id": "run"}
CALLER = SpanRef(7, 8, True)


def record(name: str = "push", **more: Any) -> SpanRecord:
    values: dict[str, Any] = {"ref": update_span("run", "u", name), "parent": None, "start": 1_000, "end": 2_000}
    return SpanRecord(name, **values | more)


def exported(*records: SpanRecord) -> list[ReadableSpan]:
    memory = InMemorySpanExporter()
    tracer = OtlpTracer(memory, PROCESS)
    for one in records:
        tracer.emit(one)
    tracer._processor.force_flush()
    spans = list(memory.get_finished_spans())
    tracer.close(5.0)
    return spans


# ---- whether ----


def test_a_daemon_and_a_client_without_tracing_import_nothing_of_opentelemetry() -> None:
    program = (
        "import sys, controlplane.coordinator.daemon, engine_agent.daemon.agent, trainer_agent.agent.daemon,"
        " controlplane.rollout.client;"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("enabled", "environment", "answer"),
    [
        (None, {}, False),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (None, {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        (False, {"OTEL_TRACES_EXPORTER": "otlp"}, False),
        (True, {}, True),
        (True, {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_settings_go_over_the_variables_and_a_disabled_sdk_over_both(
    enabled: bool | None, environment: dict[str, str], answer: bool
) -> None:
    assert wanted(TracingSettings(enabled=enabled), environment) is answer


def test_tracing_that_is_asked_for_and_not_installed_is_refused_and_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracing: tracing needs .* pip install 'weightplane\[otel\]'"):
        load_values(CoordinatorSettings, {"tracing": {"enabled": True}})
    assert load_values(CoordinatorSettings, {"tracing": {"endpoint": "http://c:4317"}}).tracing.enabled is None


async def test_variables_that_are_meant_for_others_stop_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "find_spec", lambda name: None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    with capture_logs() as lines:
        async with sending_spans(TracingSettings(), "engine", "engine-0"):
            assert not tracing.enabled()
    assert [line["event"] for line in lines] == ["tracing_unavailable"]


@pytest.mark.parametrize(
    ("variable", "value", "cause"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "OTLP over gRPC, not by http/protobuf"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "zip"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "soon"),
    ],
)
async def test_variables_that_cannot_be_used_stop_no_daemon_either(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, cause: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv(variable, value)
    with capture_logs() as lines:
        async with sending_spans(TracingSettings(), "engine", "engine-0"):
            assert not tracing.enabled()
    [line] = lines
    assert (line["event"], cause in line["cause"]) == ("tracing_unavailable", True)


@pytest.mark.parametrize(
    ("said", "problem"),
    [({"flush_seconds": -1.0}, "at least 0"), ({"endpoint": "collector:4317"}, "begins with http://")],
)
def test_settings_that_cannot_be_meant_are_refused(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_values(TracingSettings, said)


# ---- the SDK ----


def test_a_span_comes_out_of_the_sdk_as_it_was_handed_over() -> None:
    root, parent = record("update"), update_span("run", "u", "update")
    events = (SpanEvent("go", 1_500, {"weightplane.engine_id": "e"}),)
    said = record(
        parent=parent, attributes={"weightplane.bytes": 5}, events=events, error="PEER_LOST", error_message="it is gone"
    )
    first, second = exported(root, said)
    assert first.parent is None
    assert second.parent is not None
    assert (second.parent.trace_id, second.parent.span_id) == (root.ref.trace_id, root.ref.span_id)
    assert second.context is not None
    assert (second.context.trace_id, second.context.span_id) == (said.ref.trace_id, said.ref.span_id)
    assert (second.start_time, second.end_time) == (1_000, 2_000)
    assert dict(second.attributes or {}) == {"weightplane.bytes": 5, "error.type": "PEER_LOST"}
    assert [(e.name, e.timestamp) for e in second.events] == [("go", 1_500)]
    assert (second.status.status_code, second.status.description) == (api.StatusCode.ERROR, "PEER_LOST: it is gone")
    assert first.status.status_code is api.StatusCode.UNSET
    assert first.resource.attributes["service.name"] == "weightplane-engine"
    assert first.resource.attributes["service.instance.id"] == "engine-0"


def test_a_process_that_is_spoken_for_is_told_apart() -> None:
    [rank] = exported(record("rank", spoken_for="rank-3"))
    assert rank.resource.attributes["service.name"] == "weightplane-rank"
    assert rank.resource.attributes["service.instance.id"] == "engine-0/rank-3"


def test_every_process_decides_alike_which_updates_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    tracers = [OtlpTracer(InMemorySpanExporter(), PROCESS) for _ in range(2)]
    traces = [update_span("run", str(i), "update").trace_id for i in range(200)]
    first, second = ([tracer.sampled(trace) for trace in traces] for tracer in tracers)
    assert first == second
    assert 60 < sum(first) < 140
    for tracer in tracers:
        tracer.close(5.0)


def test_what_is_not_sampled_is_not_handed_over() -> None:
    with kept_spans() as kept:
        kept.keeps = False
        tracing.emit(record())
        with trace_call("Generate", SpanRef(1, 2, False)):
            pass
        with trace_call("Generate", None):
            pass
        assert kept.records == []
        with trace_call("Generate", SpanRef(1, 2, True)):
            pass
    assert [r.name for r in kept.records] == ["Generate"], "its caller decided"


class Stuck(InMemorySpanExporter):
    """A collector that takes a batch and says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.let_go.wait(60)
        return super().export(spans)


def test_a_collector_that_hangs_costs_spans_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "32")
    stuck = Stuck()
    tracer = OtlpTracer(stuck, PROCESS)
    began = time.monotonic()
    for _ in range(1_000):
        tracer.emit(record())
    assert time.monotonic() - began < 30.0
    assert len(tracer._processor._batch_processor._queue) <= 64
    began = time.monotonic()
    tracer.close(0.3)
    assert 0.25 < time.monotonic() - began < 30.0, "the end waits for its limit and no longer"
    stuck.let_go.set()


async def test_the_end_of_a_process_waits_for_a_dead_collector_within_its_limit() -> None:
    settings = TracingSettings(enabled=True, endpoint=f"http://127.0.0.1:{free_port()}", flush_seconds=0.5)
    with capture_logs() as lines:
        async with sending_spans(settings, "engine", "engine-0"):
            tracing.emit(record())
            began = time.monotonic()
    assert time.monotonic() - began < 8.0
    assert not tracing.enabled()
    said = {line["event"]: line for line in lines}
    assert "tracing_began" in said
    assert said["tracing_ended"]["seconds"] < 8.0


# ---- calls ----


async def ended(kept: Kept) -> SpanRecord:
    [span] = kept.records
    return span


async def test_a_finished_call_has_its_reason_and_its_usage() -> None:
    with kept_spans() as kept, trace_call("Generate", CALLER) as call:
        call.entered("1.4")
        call.made(2)
        call.made(3)
        call.finished("length", "", ["1.4:0-2", "1.5:2-5"], 16)
    span = await ended(kept)
    assert (span.parent, span.kind, span.error) == (CALLER, SpanKind.SERVER, "")
    assert span.ref.trace_id == CALLER.trace_id
    assert span.attributes["weightplane.outcome"] == "finished"
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 16
    assert span.attributes["weightplane.spans"] == ["1.4:0-2", "1.5:2-5"]
    assert 0 <= float(str(span.attributes["weightplane.queue_seconds"])) < 60


@pytest.mark.parametrize(
    ("error", "left", "outcome", "reason"),
    [
        (asyncio.CancelledError(), None, "cancelled", ""),
        (GeneratorExit(), 5.0, "cancelled", ""),
        (asyncio.CancelledError(), 0.0, "deadline", "DEADLINE_EXCEEDED"),
        (asyncio.CancelledError(), 0.1, "deadline", "DEADLINE_EXCEEDED"),  # it began to count before us
        (EngineDied(engine_id="e", cause="killed"), None, "lost", "ENGINE_DIED"),
        (EnginePoisoned(engine_id="e", cause="a mixture"), None, "refused", "ENGINE_POISONED"),
        (ValueError("a secret"), None, "failed", "ValueError"),
    ],
)
async def test_every_end_of_a_call_ends_its_span(
    error: BaseException, left: float | None, outcome: str, reason: str
) -> None:
    with kept_spans() as kept, suppress(type(error)), trace_call("Generate", CALLER, lambda: left):
        raise error
    span = await ended(kept)
    assert (span.attributes["weightplane.outcome"], span.error) == (outcome, reason)
    assert "secret" not in span.error_message


async def test_a_caller_that_leaves_after_the_last_word_has_cancelled_nothing() -> None:
    with kept_spans() as kept, suppress(GeneratorExit), trace_call("Generate", CALLER) as call:
        call.finished("stop", "", [])
        raise GeneratorExit
    assert (await ended(kept)).attributes["weightplane.outcome"] == "finished"


async def test_an_abort_is_an_end_of_its_own_and_says_whose() -> None:
    with kept_spans() as kept, trace_call("Generate", CALLER) as call:
        call.finished("abort", "poisoned", ["1.4:0-2"])
    span = await ended(kept)
    assert (span.attributes["weightplane.outcome"], span.attributes["weightplane.abort_cause"]) == (
        "aborted",
        "poisoned",
    )


def test_who_has_no_tracer_hands_the_callers_span_on_as_it_is() -> None:
    with trace_call("proxy Generate", CALLER) as call:
        assert call.metadata == (("traceparent", CALLER.traceparent),)
    with trace_call("proxy Generate", None) as call:
        assert call.metadata == ()


def test_who_has_one_hands_its_own_span_on() -> None:
    with kept_spans() as kept, trace_call("proxy Generate", CALLER) as call:
        [(_, text)] = call.metadata
    handed = parse_traceparent(text)
    assert handed is not None
    assert (handed.trace_id, handed.span_id) == (CALLER.trace_id, kept.records[0].ref.span_id)


def test_a_client_names_the_span_that_its_caller_is_in() -> None:
    assert caller_metadata() == ()
    with TracerProvider().get_tracer("loop").start_as_current_span("step") as span:
        [(key, text)] = caller_metadata()
    found = span.get_span_context()
    assert (key, parse_traceparent(text)) == ("traceparent", SpanRef(found.trace_id, found.span_id, True))


# ---- phases ----


def test_the_phase_that_raised_is_the_last_one() -> None:
    phases = Phases()
    with phases.phase("quiesce"):
        pass
    with suppress(ValueError), phases.phase("load"):
        raise ValueError
    assert [p.name for p in phases.done] == ["quiesce", "load"]


def test_a_phase_is_split_where_its_last_part_began() -> None:
    phases = Phases()
    with phases.phase("load"):
        time.sleep(0.02)
    whole = phases.done[0]
    phases.split("caches", 0.01)
    load, caches = phases.done
    assert (load.start, load.end, caches.end) == (whole.start, caches.start, whole.end)
    assert caches.end - caches.start == pytest.approx(0.01)


def test_the_page_names_every_setting_and_its_file_is_taken(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text()
    [settings] = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "coordinator.toml").write_text(settings)
    assert load(CoordinatorSettings, tmp_path / "coordinator.toml").tracing.endpoint == "http://collector:4317"
    assert [name for name in TracingSettings.__slots__ if f"`{name}`" not in page] == []

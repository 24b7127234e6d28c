"""One span for each call of Generate, over real gRPC, whatever ends it; and updates while their collector is dead."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider

from controlplane import tracing
from controlplane.core.errors import EngineDied
from controlplane.core.sampling import SamplingSettings
from controlplane.core.traces import SEND, UPDATE, SpanRecord, SpanRef, update_span
from controlplane.rollout.client import RolloutClient
from controlplane.tracing.otlp import OtlpTracer
from tests.cases.engines import Hands
from tests.support import checkpoint_fleet as by_checkpoint
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.local_fleet import RUN, LocalFleet, local_fleet
from tests.support.otlp_collector import Kept, kept_spans
from tests.support.ports import free_port
from tests.support.writer import Weights
from weightplane.v1 import rollout_pb2, rollout_pb2_grpc

CALLER = SpanRef(0xABC, 0xDEF, True)
SLOW = 0.002
DEADLINE_SECONDS = 2.0
"""Of a call that is in the engine long before it."""


@pytest.fixture
def kept() -> Iterator[Kept]:
    with kept_spans() as spans:
        yield spans


@pytest.fixture
async def fleet(tmp_path: Path, hands: Hands) -> AsyncIterator[LocalFleet]:
    async with local_fleet(tmp_path, engines=1, seconds_per_token=SLOW) as running:
        await running.push(Weights())

        async def routable() -> bool:
            return (await running.engine("e0")).routable

        await eventually(routable)
        yield running


async def engine_stub(fleet: LocalFleet) -> Any:
    return rollout_pb2_grpc.RolloutStub(fleet.channel((await fleet.engine("e0")).endpoint))


def ask(tokens: int, name: str = "sample", **more: Any) -> rollout_pb2.GenerateRequest:
    sampling = rollout_pb2.SamplingParams(max_tokens=tokens, **more)
    return rollout_pb2.GenerateRequest(
        run_id=RUN, model="policy", request_id=name, prompt_token_ids=[1, 2, 3], sampling=sampling
    )


def called(stub: Any, request: rollout_pb2.GenerateRequest, **how: Any) -> Any:
    return stub.Generate(
        request, metadata=(("traceparent", CALLER.traceparent),), **{"timeout": PATIENCE_SECONDS, **how}
    )


async def span_of(kept: Kept, name: str = "Generate") -> SpanRecord:
    await eventually(lambda: bool(kept.named(name)))
    [span] = kept.named(name)
    return span


async def test_a_finished_sample_has_usage_versions_and_its_callers_trace(fleet: LocalFleet, kept: Kept) -> None:
    async for _ in called(await engine_stub(fleet), ask(5, n=2)):
        pass
    span = await span_of(kept)
    assert (span.parent, span.ref.trace_id, span.error) == (CALLER, CALLER.trace_id, "")
    expected: dict[str, Any] = {
        "weightplane.outcome": "finished",
        "weightplane.engine_id": "e0",
        "weightplane.request_id": "sample",
        "weightplane.version": "1.1",
        "weightplane.spans": ["1.1:0-5", "1.1:0-5"],
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert {key: span.attributes.get(key) for key in expected} == expected
    assert float(str(span.attributes["weightplane.queue_seconds"])) < PATIENCE_SECONDS
    assert span.end - span.start >= 5 * SLOW * 1e9


async def test_a_caller_that_goes_away_ends_the_span_as_cancelled(fleet: LocalFleet, kept: Kept) -> None:
    call = called(await engine_stub(fleet), ask(2000))
    await call.read()
    assert kept.named("Generate") == [], "it is not over"
    call.cancel()
    span = await span_of(kept)
    assert (span.attributes["weightplane.outcome"], span.error) == ("cancelled", "")
    assert int(str(span.attributes["gen_ai.usage.output_tokens"])) >= 1


async def test_a_deadline_that_passes_is_an_error_of_the_span(hands: Hands, fleet: LocalFleet, kept: Kept) -> None:
    hands["e0"].limit_samples(1)
    call = called(await engine_stub(fleet), ask(2000), timeout=DEADLINE_SECONDS)
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    span = await span_of(kept)
    assert (span.attributes["weightplane.outcome"], span.error) == ("deadline", "DEADLINE_EXCEEDED")


async def test_an_abort_and_a_refusal_are_ends_too(fleet: LocalFleet, kept: Kept) -> None:
    stub = await engine_stub(fleet)
    call = called(stub, ask(2000))
    await call.read()
    await stub.Abort(
        rollout_pb2.AbortRequest(run_id=RUN, model="policy", request_ids=["sample"]), timeout=PATIENCE_SECONDS
    )
    while await call.read() is not grpc.aio.EOF:
        pass
    span = await span_of(kept)
    assert (span.attributes["weightplane.outcome"], span.attributes["weightplane.abort_cause"]) == (
        "aborted",
        "aborted",
    )
    kept.records.clear()
    with pytest.raises(grpc.aio.AioRpcError):
        await called(stub, ask(1_000_000)).read()
    refused = await span_of(kept)
    assert (refused.attributes["weightplane.outcome"], refused.error) == ("refused", "INVALID_REQUEST")


async def test_a_dying_engine_ends_the_span_as_lost(
    hands: Hands, fleet: LocalFleet, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = called(await engine_stub(fleet), ask(4000))
    await call.read()

    async def gone() -> None:
        raise EngineDied(engine_id="e0", cause="killed")

    monkeypatch.setattr(hands["e0"].engine, "probe", gone)
    span = await span_of(kept)
    assert (span.attributes["weightplane.outcome"], span.error) == ("lost", "ENGINE_DIED")
    call.cancel()


async def test_an_engine_that_dies_in_its_install_ends_what_it_did_and_its_requests(
    hands: Hands, fleet: LocalFleet, kept: Kept
) -> None:
    call = called(await engine_stub(fleet), ask(2000))
    await call.read()
    hands["e0"].fail("quiesce", EngineDied(engine_id="e0", cause="killed"))
    await fleet.push(Weights(), step=1)
    span = await span_of(kept)
    assert (span.attributes["weightplane.outcome"], span.attributes["weightplane.abort_cause"]) == (
        "aborted",
        "poisoned",
    )
    assert [(s.name, s.error) for s in kept.records if s.name in ("install", "quiesce")] == [
        ("install", "ENGINE_DIED"),
        ("quiesce", "ENGINE_DIED"),
    ]


async def test_the_coordinators_span_stands_between_the_callers_and_the_engines(fleet: LocalFleet, kept: Kept) -> None:
    proxy: Any = rollout_pb2_grpc.RolloutStub(fleet.channel(fleet.address))
    async for _ in called(proxy, ask(4)):
        pass
    above, below = await span_of(kept, "proxy Generate"), await span_of(kept)
    assert above.parent == CALLER
    assert below.parent is not None
    assert (below.parent.trace_id, below.parent.span_id) == (above.ref.trace_id, above.ref.span_id)
    for span in (above, below):
        assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert span.attributes["gen_ai.usage.output_tokens"] == 4


async def test_a_rollout_client_hands_its_callers_span_on(fleet: LocalFleet, kept: Kept) -> None:
    tracer = TracerProvider().get_tracer("loop")
    async with RolloutClient(fleet.address, run_id=RUN) as rollouts:
        with tracer.start_as_current_span("rollout step") as step:
            await rollouts.generate([1, 2, 3], SamplingSettings(max_tokens=2))
    span = await span_of(kept)
    assert span.parent is not None
    assert span.parent.span_id == step.get_span_context().span_id
    assert span.ref.trace_id == step.get_span_context().trace_id


# ---- updates ----


async def test_a_catch_up_is_a_trace_of_its_own_with_the_coordinator_as_its_sender(tmp_path: Path, kept: Kept) -> None:
    async with by_checkpoint.checkpoint_fleet(tmp_path, engines=1) as fleet:
        weights = Weights()
        await by_checkpoint.keep(fleet, weights, await fleet.push(weights))
        kept.records.clear()
        by_checkpoint.start_engine(fleet, "late")
        await eventually(lambda: len(kept.named("install")) == 1 and len(kept.named("catch up")) == 1)
    sent, installed, received = (*kept.named("catch up"), *kept.named("install"), *kept.named("receive"))
    update_id = str(sent.attributes["weightplane.update_id"])
    assert update_id.startswith("catch-up-")
    assert (sent.parent, sent.ref) == (None, update_span(RUN, update_id, SEND, "late"))
    for span in (installed, received):
        assert span.parent is not None
        assert span.parent.span_id == sent.ref.span_id
    assert received.attributes["weightplane.transport"] == "checkpoint"


async def test_a_stream_that_ends_before_its_bytes_is_an_error_of_its_receipt(fleet: LocalFleet, kept: Kept) -> None:
    begun, weights = await fleet.begin(), Weights()
    stream = fleet.stream(begun, "e0")
    await stream.open()
    await stream.chunk(weights, 0, [0])
    assert (await stream.read()).WhichOneof("frame") == "chunk_released"
    stream.cut()
    span = await span_of(kept, "receive")
    assert (span.error, span.attributes["weightplane.bytes"]) == ("UPDATE_ABORTED", len(weights.parts[0]))
    state = await fleet.decided(begun.update_id)
    root = await span_of(kept, "update")
    assert (root.ref.span_id, root.error) == (update_span(RUN, begun.update_id, UPDATE).span_id, "UPDATE_FAILED")
    assert root.attributes["weightplane.cause"] == state.cause
    assert kept.named("install") == []


async def test_a_dead_collector_makes_no_update_slower(fleet: LocalFleet) -> None:
    exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{free_port()}", insecure=True)
    tracer = OtlpTracer(exporter, {"component": "engine", "instance": "e0", "run_id": RUN})
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for step in range(16):
        began, traced = time.monotonic(), step % 2 == 0
        if traced:
            with tracing.use(tracer):
                await fleet.push(Weights(), step=step)
        else:
            await fleet.push(Weights(), step=step)
        seconds[traced].append(time.monotonic() - began)
    await asyncio.to_thread(tracer.close, 0.5)
    with_it, without = (statistics.median(seconds[traced]) for traced in (True, False))
    assert with_it < 1.5 * without + 0.05, (with_it, without)

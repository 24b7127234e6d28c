"""An agent at a server that it did not start: what it demands, what it writes over, and when it lets go. No vLLM here:
the contract suite and tests/e2e/test_external_real.py have the real one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.errors import EngineDied, UnsupportedByEngine
from engine_agent.external.engine import ExternalEngine, ExternalSettings
from tests.support.external_engine import STATE, put
from tests.support.ports import free_port
from tests.support.recording_server import RecordingServer


async def test_inv1_a_label_that_is_found_there_is_written_over_and_the_server_stands_still(
    server: RecordingServer, attach: Any
) -> None:
    server.label = "17"
    engine = await attach()
    assert server.label.startswith("unset.")
    assert server.paused
    facts = engine._started_facts
    assert facts.initial_digest is None
    assert set(facts.expected.shapes) == set(STATE)
    assert (facts.max_requests, facts.vocab_size, facts.max_model_len) == (7, 256, 64)
    assert facts.capabilities == {"staged", "rollback", "streaming", "prefix_cache", "processed_logprobs"}


@pytest.mark.parametrize(
    ("where", "found", "advice"),
    [
        ("model_config.logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("scheduler_config.policy", "fcfs", "--scheduling-policy priority"),
        ("scheduler_config.stream_interval", 10, "--stream-interval 1"),
        ("parallel_config.data_parallel_size", 2, "--data-parallel-size 1"),
        ("parallel_config._api_process_count", 2, "--api-server-count 1"),
        ("weight_transfer_config.backend", "nccl", """--weight-transfer-config '{"backend": "weightplane"}'"""),
        ("speculative_config.method", "ngram", "no --speculative-config"),
        ("kv_transfer_config.kv_connector", "ExampleConnector", "no --kv-transfer-config"),
        ("model_config.model", "/elsewhere", "it loaded /elsewhere, the settings say"),
    ],
)
async def test_a_server_that_was_started_otherwise_is_left_as_it_is_and_the_text_says_how_to_start_it(
    server: RecordingServer, attach: Any, where: str, found: Any, advice: str
) -> None:
    section, _, name = where.partition(".")
    server.config[section] = {**(server.config[section] or {}), name: found}
    with pytest.raises(EngineDied) as refusal:
        await attach()
    assert advice in str(refusal.value)
    assert (server.label, server.paused) == ("default", False)


@pytest.mark.parametrize(
    ("path", "status", "advice"),
    [
        ("/server_info", 404, "VLLM_SERVER_DEV_MODE=1"),
        ("/inference/v1/generate", 403, "--enable-scale-out"),
        ("/collective_rpc", 500, "--worker-extension-cls engine_agent.vllm.worker.WorkerExtension"),
    ],
)
async def test_a_route_that_is_missing_is_named_with_what_opens_it(
    server: RecordingServer, attach: Any, path: str, status: int, advice: str
) -> None:
    server.refuse[path] = status
    with pytest.raises(EngineDied) as refusal:
        await attach()
    assert advice in str(refusal.value)
    assert server.label == "default"


async def test_a_server_that_is_not_there_yet_is_waited_for_and_no_longer_than_the_limit(model: Path) -> None:
    settings = ExternalSettings(f"http://127.0.0.1:{free_port()}", model, start_timeout_seconds=0.8)
    engine = ExternalEngine(settings, "e0")
    with pytest.raises(EngineDied, match=r"the server at .* did not answer within 0.8 s"):
        await engine.start()
    await engine.shutdown()


async def test_inv1_a_label_that_this_agent_did_not_set_ends_this_life_and_the_server_is_left_to_whoever_set_it(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    await put(engine, "7")
    await engine.resume()
    server.label = "8"
    with pytest.raises(EngineDied, match="the label '8' where this agent set '7\\."):
        await engine.probe()
    await engine.shutdown()
    assert (server.label, server.paused) == ("8", False)


async def test_a_server_whose_agent_ends_is_left_paused(server: RecordingServer, attach: Any) -> None:
    engine = await attach()
    await put(engine, "7")
    await engine.resume()
    assert not server.paused
    await engine.shutdown()
    assert server.paused
    assert server.label.startswith("7.")


async def test_an_external_engine_refuses_to_sleep_and_takes_no_handles(server: RecordingServer, attach: Any) -> None:
    engine = await attach()
    with pytest.raises(UnsupportedByEngine):
        await engine.sleep(1)
    with pytest.raises(UnsupportedByEngine):
        await engine.wake(kv_cache=True)
    with pytest.raises(UnsupportedByEngine, match="handles"):
        await engine.install_handles([])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"url": "http://10.0.0.1:8000"}, "10.0.0.1 is not loopback; beyond_loopback = true"),
        ({"url": "http://10.0.0.1:8000", "beyond_loopback": True, "transfer": "ipc"}, "over loopback only"),
        ({"url": "http://example.org:8000"}, "example.org is not loopback"),
        ({"url": "127.0.0.1:8000"}, "is not http://HOST:PORT"),
        ({"url": "http://127.0.0.1:8000/v1"}, "is not http://HOST:PORT"),
        ({"url": "http://localhost:8000", "device_uuids": ("a", "a")}, "different devices"),
    ],
)
def test_s1_settings_that_reach_too_far_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        ExternalSettings(model=Path("model"), **settings)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://[::1]:8000/", "https://localhost:8000"])
def test_loopback_is_what_stays_on_this_host(url: str) -> None:
    assert ExternalSettings(url, Path("model"), transfer="ipc").loopback

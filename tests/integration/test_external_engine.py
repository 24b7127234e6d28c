"""An agent at a server that it did not start: what it sends, what it believes, and when it lets go. No vLLM here; the
contract suite and tests/e2e/test_external_real.py have the real one."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from controlplane.core.errors import (
    CanaryFailed,
    DeadlineExceeded,
    EngineDied,
    InstallFailed,
    InstallTimedOut,
    InvalidRequest,
    IpcNotPossible,
    RequestAborted,
    UnsupportedByEngine,
)
from controlplane.core.sampling import SamplingSettings
from engine_agent.engine import GenerationDelta
from engine_agent.external.engine import ExternalEngine, ExternalSettings
from engine_agent.external.ipc import TensorHandle
from engine_agent.vllm.canary import DECODED_TOKENS, PROMPT_TOKENS
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.recording_server import RecordingServer, good_config, recording_server
from tests.support.staging import layout_of, stage
from weightplane.v1 import layout_pb2

pytestmark = pytest.mark.timeout(60)
STATE = {"a": torch.arange(8.0).reshape(4, 2), "b": torch.ones(3)}
SAMPLING = SamplingSettings(max_tokens=8)
FINISH = "/finish_weight_update"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(STATE, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"vocab_size": 256, "tie_word_embeddings": False}))
    return directory


@pytest.fixture
async def server(model: Path) -> AsyncIterator[RecordingServer]:
    async with recording_server(RecordingServer(good_config(str(model)))) as running:
        yield running


@pytest.fixture
async def attach(server: RecordingServer, model: Path) -> AsyncIterator[Any]:
    async with AsyncExitStack() as ends:

        async def attached(**settings: Any) -> ExternalEngine:
            short = {"start_timeout_seconds": 5.0, "call_timeout_seconds": 5.0, "install_timeout_seconds": 5.0}
            engine = ExternalEngine(ExternalSettings(server.url, model, **(short | settings)), "e0")
            ends.push_async_callback(engine.shutdown)
            await engine.start()
            return engine

        yield attached


async def put(engine: ExternalEngine, label: str) -> None:
    await engine.quiesce()
    with stage(STATE, label) as staged:
        await engine.install(staged)


async def consume(
    engine: ExternalEngine, name: str, into: list[GenerationDelta] | None = None
) -> list[GenerationDelta]:
    found = [] if into is None else into
    async for delta in engine.generate(name, [1, 2, 3], SAMPLING):
        found.append(delta)
    return found


# ---- attaching ----------------------------------------------------------------------------------


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
    assert facts.capabilities == {"staged", "rollback", "streaming", "prefix_cache"}


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


# ---- installs -----------------------------------------------------------------------------------


async def test_inv1_an_install_is_checked_then_put_in_then_caches_go_and_the_label_comes_last_and_is_read_back(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    server.calls.clear()
    await put(engine, "7")
    steps = [body["update_info"]["step"] for body in server.posted("/update_weights")]
    assert steps == ["check", "install"]
    order = ["/start_weight_update", "/update_weights", "/reset_prefix_cache", FINISH]
    assert [p for p in dict.fromkeys(server.paths) if p in order] == order
    assert server.label.startswith("7.")
    first = server.label
    await engine.probe()
    await put(engine, "7")
    assert server.label != first  # a label tells two installs of one version apart


async def test_inv1_the_version_does_not_move_on_500_and_what_was_touched_is_said(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    await put(engine, "7")
    held = server.label
    server.refuse["/start_weight_update"] = 500
    with pytest.raises(InstallFailed) as failure:
        await put(engine, "8")
    assert not failure.value.touched
    assert server.label == held
    await engine.probe()
    del server.refuse["/start_weight_update"]
    server.results["check"] = {"ok": False, "touched": False, "cause": "no such file", "loaded": 0}
    with pytest.raises(InstallFailed, match="no such file") as failure:
        await put(engine, "8")
    assert not failure.value.touched
    assert server.label == held
    server.results.clear()
    server.refuse[FINISH] = 500
    with pytest.raises(InstallFailed) as failure:
        await put(engine, "8")
    assert failure.value.touched
    assert server.label.startswith("mixture.")
    await engine.probe()
    server.refuse["/update_weight_version"] = 500
    with pytest.raises(EngineDied):  # neither the label nor the way back was taken
        await put(engine, "8")


async def test_inv4_an_install_that_failed_in_a_worker_leaves_a_label_that_is_no_version_and_the_next_one_heals(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    await put(engine, "7")
    server.results["install"] = {"ok": False, "touched": True, "cause": "it broke", "loaded": 1}
    with pytest.raises(InstallFailed, match="it broke") as failure:
        await put(engine, "8")
    assert failure.value.touched
    assert server.label.startswith("mixture.")
    server.results.clear()
    await put(engine, "9")
    assert server.label.startswith("9.")


async def test_inv4_an_install_without_an_answer_has_no_outcome_and_ends_this_life(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach(install_timeout_seconds=0.5)
    await put(engine, "7")
    server.hold["/update_weights"] = asyncio.Event()
    with pytest.raises(InstallTimedOut):
        await put(engine, "8")
    with pytest.raises(EngineDied, match="may still be running"):
        await engine.probe()
    server.hold["/update_weights"].set()
    again = await attach()
    assert server.label.startswith("unset.")  # nothing of the life before is known
    await put(again, "8")


async def test_inv4_an_install_that_was_broken_off_ends_this_life(server: RecordingServer, attach: Any) -> None:
    engine = await attach()
    server.hold["/update_weights"] = asyncio.Event()
    installing = asyncio.create_task(put(engine, "7"))
    await eventually(lambda: bool(server.posted("/update_weights")))
    installing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await installing
    with pytest.raises(EngineDied, match="broken off"):
        await engine.probe()
    server.hold["/update_weights"].set()


@pytest.mark.parametrize("path", ["/update_weights", FINISH])
async def test_inv1_a_connection_that_breaks_in_an_install_ends_this_life(
    server: RecordingServer, attach: Any, path: str
) -> None:
    engine = await attach()
    server.cut.add(path)
    with pytest.raises(EngineDied):
        await put(engine, "8")
    with pytest.raises(EngineDied):
        await consume(engine, "late")


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


async def test_a_probe_beside_a_label_that_is_being_set_waits_for_its_answer(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    server.hold[FINISH] = asyncio.Event()
    installing = asyncio.create_task(put(engine, "7"))
    await eventually(lambda: server.label.startswith("7."))
    probing = asyncio.create_task(engine.probe())
    await asyncio.sleep(0.05)
    assert not probing.done()
    server.hold[FINISH].set()
    await asyncio.gather(installing, probing)


async def test_a_server_whose_agent_ends_is_left_paused(server: RecordingServer, attach: Any) -> None:
    engine = await attach()
    await put(engine, "7")
    await engine.resume()
    assert not server.paused
    await engine.shutdown()
    assert server.paused
    assert server.label.startswith("7.")


# ---- tokens -------------------------------------------------------------------------------------


async def test_inv11_spans_carry_this_agent_s_labels_and_another_s_equal_no_version(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    await put(engine, "7")
    await engine.resume()
    running = asyncio.create_task(consume(engine, "r1"))
    await eventually(lambda: "r1" in server.streams)
    server.say("r1", 5, 6)
    ours, foreign = (server.label, 0, 2), ("7", 2, 3)
    server.say("r1", 9, finish_reason="length", weight_versions=server.spans(ours, foreign))
    deltas = await running
    assert [t for d in deltas for t in d.token_ids] == [5, 6, 9]
    assert deltas[-1].engine_spans == (("7", 0, 2), ("7", 2, 3))
    (body,) = server.posted("/inference/v1/generate")[-1:]
    assert (body["token_ids"], body["cache_salt"]) == ([1, 2, 3], server.label)


async def test_inv11_standing_still_waits_until_every_token_that_the_server_handed_on_has_come(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    await put(engine, "7")
    await engine.resume()
    deltas: list[GenerationDelta] = []
    running = asyncio.create_task(consume(engine, "r1", deltas))
    await eventually(lambda: "r1" in server.streams)
    server.say("r1", 5)
    await eventually(lambda: len(deltas) == 1)
    server.out["r1"] = 2  # one more is out, and still on its way
    quiescing = asyncio.create_task(engine.quiesce())
    await eventually(lambda: server.paused)
    await asyncio.sleep(0.05)
    assert not quiescing.done()
    server.out["r1"] = 1
    server.say("r1", 6)
    assert (await quiescing).token_counts == {"r1": 2}
    assert len(deltas) == 2
    running.cancel()


async def test_a_hand_over_that_does_not_end_is_no_standing_still(server: RecordingServer, attach: Any) -> None:
    engine = await attach(call_timeout_seconds=0.3)
    running = asyncio.create_task(consume(engine, "r1"))
    await eventually(lambda: "r1" in server.out)
    server.out["r1"] = 2
    with pytest.raises(DeadlineExceeded):
        await engine.quiesce()
    running.cancel()


async def test_where_the_server_has_no_routes_of_ours_requests_end_with_their_tokens_instead_of_being_kept(
    server: RecordingServer, attach: Any
) -> None:
    server.plugin = False
    engine = await attach()
    await put(engine, "7")
    await engine.resume()
    running = asyncio.create_task(consume(engine, "r1"))
    await eventually(lambda: "r1" in server.out)
    server.say("r1", 5)
    assert (await engine.quiesce()).token_counts == {}
    deltas = await running
    assert [t for d in deltas for t in d.token_ids] == [5]
    assert deltas[-1].finish_reason == "abort"


async def test_what_the_server_refuses_is_its_caller_s_error_and_what_it_breaks_off_too(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    server.refuse["/inference/v1/generate"] = 400
    with pytest.raises(InvalidRequest, match="was refused"):
        await consume(engine, "r1")
    server.refuse["/inference/v1/generate"] = 500
    with pytest.raises(RequestAborted):
        await consume(engine, "r2")
    server.refuse.clear()
    running = asyncio.create_task(consume(engine, "r3"))
    await eventually(lambda: "r3" in server.streams)
    server.streams["r3"].put_nowait({"error": {"message": "it broke"}})
    with pytest.raises(RequestAborted):
        await running
    await engine.probe()
    with pytest.raises(InvalidRequest, match="with max_tokens 1 only"):
        await anext(engine.generate("r4", [1, 2], SamplingSettings(max_tokens=2, prompt_logprobs=True)))


async def test_a_stream_that_ends_without_a_reason_ends_this_life(server: RecordingServer, attach: Any) -> None:
    engine = await attach()
    running = asyncio.create_task(consume(engine, "r1"))
    await eventually(lambda: "r1" in server.streams)
    server.streams["r1"].put_nowait(None)
    with pytest.raises(EngineDied, match="without a reason"):
        await running


@pytest.mark.parametrize("floor", [-9999.0, None])
async def test_a_canary_whose_numbers_vllm_replaced_is_silent(
    server: RecordingServer, attach: Any, floor: float | None
) -> None:
    engine = await attach()
    await put(engine, "7")

    async def answer() -> None:
        await eventually(lambda: bool(server.streams))
        (name,) = server.streams
        prompt = server.posted("/inference/v1/generate")[-1]["token_ids"]
        scored = [None, *({str(t): {"logprob": -1.0}} for t in prompt[1:])]
        entries = [{"logprob": -1.0}] * (DECODED_TOKENS - 1) + [{"logprob": floor}]
        choice = {"token_ids": list(range(DECODED_TOKENS)), "logprobs": {"content": entries}}
        server.out.pop(name)
        server.streams[name].put_nowait({"choices": [choice], "prompt_logprobs": scored})

    answering = asyncio.create_task(answer())
    with pytest.raises(CanaryFailed, match=f"1 of {PROMPT_TOKENS - 1 + DECODED_TOKENS} logprobs are not finite"):
        await engine.canary()
    await answering
    assert server.paused


async def test_an_external_engine_refuses_to_sleep_and_takes_no_handles(server: RecordingServer, attach: Any) -> None:
    engine = await attach()
    with pytest.raises(UnsupportedByEngine):
        await engine.sleep(1)
    with pytest.raises(UnsupportedByEngine):
        await engine.wake(kv_cache=True)
    with pytest.raises(UnsupportedByEngine, match="handles"):
        await engine.install_handles([])


# ---- handles of device memory, to vLLM's own IPC engine -----------------------------------------

DEVICE = "GPU-6f1e9f3a-0000-0000-0000-000000000001"
LAYOUT = layout_of(STATE)


def handle(tensor: int, **changed: Any) -> TensorHandle:
    """Of a tensor that lies 64 bytes into its exported buffer."""
    values: dict[str, Any] = {
        "memory_handle": b"h" * 64,
        "buffer_bytes": 1024,
        "buffer_offset": 512,
        "ref_counter_handle": b"counter",
        "ref_counter_offset": 3,
        "event_handle": b"event",
        "event_sync_required": True,
        "offset": 64,
        "byte_count": LAYOUT.tensors[tensor].byte_count,
        "torch_version": torch.__version__,
    }
    cuda = layout_pb2.CudaIpcRange(**values | changed)
    return TensorHandle(tensor, [layout_pb2.BufferHandle(device_uuid=DEVICE, cuda_ipc=cuda)])


async def put_handles(engine: ExternalEngine, label: str) -> None:
    await engine.quiesce()
    await engine.begin_streaming(LAYOUT, label)
    await engine.install_handles([handle(0), handle(1)])
    await engine.finish_streaming()


@pytest.fixture
def ipc(server: RecordingServer, attach: Any, model: Path) -> Any:
    """Attaches to a server that was started for handles."""
    server.config["weight_transfer_config"] = {"backend": "ipc"}
    server.environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = True
    server.device_uuid = DEVICE.removeprefix("GPU-")
    return lambda: attach(transfer="ipc")


async def test_s1_handles_go_as_a_pickle_of_torch_s_own_arguments_and_their_metadata_passes_through(
    server: RecordingServer, ipc: Any
) -> None:
    engine: ExternalEngine = await ipc()
    assert not {"staged", "rollback", "streaming"} & engine._started_facts.capabilities
    server.calls.clear()
    await engine.quiesce()
    await engine.begin_streaming(LAYOUT, "7")
    await engine.install_handles([handle(1), handle(0)])
    report = await engine.finish_streaming()
    assert report.loaded_tensors == 2
    assert server.posted("/init_weight_transfer_engine") == [{"init_info": {"packed": False}}]
    (body,) = server.posted("/update_weights")
    pickled = body["update_info"].pop("ipc_handles_pickled")
    assert body == {"update_info": {"names": ["b", "a"], "dtype_names": ["float32"] * 2, "shapes": [[3], [4, 2]]}}
    uuid = DEVICE.removeprefix("GPU-")  # torch's own text of it, by which vLLM looks
    first, second = pickle.loads(base64.b64decode(pickled))  # noqa: S301 - as vLLM does
    exported = (b"h" * 64, 1024, 512, False, b"counter", 3, b"event", True)
    head = (torch.Tensor, (4, 2), (2, 1), 16, torch.UntypedStorage, torch.float32, 0)
    assert second == {uuid: (*head, *exported)}
    assert first[uuid][1:4] == ((3,), (1,), 16)
    assert server.label.startswith("7.")
    await engine.probe()


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", FINISH])
async def test_inv1_with_handles_too_the_version_moves_on_200_and_not_on_500_and_only_a_fresh_server_heals(
    server: RecordingServer, ipc: Any, path: str
) -> None:
    engine: ExternalEngine = await ipc()
    await put_handles(engine, "7")
    server.refuse[path] = 500
    with pytest.raises(EngineDied, match="the server must be started anew"):
        await put_handles(engine, "8")
    assert server.label.startswith("mixture.")
    server.refuse.clear()
    with pytest.raises(EngineDied, match="no way back: start it anew"):
        await ipc()
    assert server.label.startswith("mixture.")


async def test_inv4_a_session_of_handles_that_nobody_ended_keeps_the_next_agent_from_that_server(
    server: RecordingServer, ipc: Any
) -> None:
    engine: ExternalEngine = await ipc()
    await put_handles(engine, "7")
    server.cut.add("/update_weights")
    with pytest.raises(EngineDied):
        await put_handles(engine, "8")
    with pytest.raises(EngineDied, match="no way back: start it anew"):
        await ipc()


async def test_inv1_handles_that_did_not_all_come_make_no_version(server: RecordingServer, ipc: Any) -> None:
    engine: ExternalEngine = await ipc()
    await engine.quiesce()
    await engine.begin_streaming(LAYOUT, "7")
    await engine.install_handles([handle(0)])
    with pytest.raises(EngineDied, match=r"1 tensors did not come: \['b'\]"):
        await engine.finish_streaming()
    assert server.label.startswith("mixture.")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"torch_version": "1.0"}, r"of torch 1\.0, this agent has"),
        ({"byte_count": 8}, "a has 32 bytes, its handle 8"),
        ({"offset": 1000}, "32 bytes at 1000 of 1024"),
        ({"offset": 2}, "32 bytes at 2 of 1024"),
    ],
)
async def test_a_handle_that_is_not_what_the_layout_says_is_not_sent(
    server: RecordingServer, ipc: Any, changed: dict[str, Any], problem: str
) -> None:
    engine: ExternalEngine = await ipc()
    await engine.quiesce()
    await engine.begin_streaming(LAYOUT, "7")
    with pytest.raises(IpcNotPossible, match=problem):
        await engine.install_handles([handle(0, **changed)])
    with pytest.raises(IpcNotPossible, match="no handle of a is for it"):
        await engine.install_handles([TensorHandle(0, [])])
    assert not server.posted("/update_weights")


async def test_staged_bytes_do_not_go_into_a_server_for_handles(server: RecordingServer, ipc: Any) -> None:
    engine: ExternalEngine = await ipc()
    with pytest.raises(InstallFailed, match="no staged bytes") as failure:
        await put(engine, "7")
    assert not failure.value.touched


async def test_s1_a_server_that_sends_the_agent_elsewhere_is_not_obeyed(
    server: RecordingServer, ipc: Any, model: Path
) -> None:
    engine: ExternalEngine = await ipc()
    async with recording_server(RecordingServer(good_config(str(model)))) as elsewhere:
        server.redirect["/update_weights"] = f"{elsewhere.url}/update_weights"
        with pytest.raises(EngineDied, match="307"):
            await put_handles(engine, "7")
        assert elsewhere.calls == []


async def test_s1_a_server_that_unpickles_nothing_is_told_how_to_be_started(server: RecordingServer, ipc: Any) -> None:
    server.environment.clear()
    with pytest.raises(EngineDied, match="VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        await ipc()


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

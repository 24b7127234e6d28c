"""Handles of device memory, to vLLM's own IPC engine in a server that the agent did not start. No vLLM here:
the contract suite and tests/e2e/test_external_real.py have the real one."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from controlplane.core.errors import EngineDied, InstallFailed, IpcNotPossible
from engine_agent.external.engine import ExternalEngine
from engine_agent.external.ipc import TensorHandle
from tests.support.external_engine import FINISH, STATE, put
from tests.support.recording_server import RecordingServer, good_config, recording_server
from tests.support.staging import layout_of
from weightplane.v1 import layout_pb2

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

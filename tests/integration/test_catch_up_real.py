"""A real vLLM engine that joins is brought to the served version from a checkpoint, and one of a frozen model serves at
once: tokens are those of the same weights in transformers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash

from controlplane.checkpoints import CheckpointManifest, write_checkpoint
from controlplane.core.layout import DType, Layout, content_digest
from controlplane.core.versions import ModelName, RunId, Term, WeightVersion
from controlplane.exit_codes import ExitCode
from controlplane.rpc.errors import from_rpc_error
from tests.support.checkpoint_fleet import (
    Person,
    checkpoint_fleet,
    checkpoint_root,
    open_directly,
    publish,
    routable,
    start_engine,
)
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.reference import Reference
from tests.support.staging import layout_of
from tests.support.tiny_engine import read_state, tiny_settings
from tests.support.tiny_model import make_tiny_model
from tests.support.writer import Stream
from weightplane.v1 import fleet_pb2, rollout_pb2, rollout_pb2_grpc, version_pb2, weight_update_pb2

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
PROMPT = [5, 6, 7, 8, 9]
START_SECONDS = 150.0
NAME = "policy-1"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The one that engines load, and the one that was trained since."""
    directory = tmp_path_factory.mktemp("models")
    return make_tiny_model(directory / "loaded", 1), make_tiny_model(directory / "trained", 2)


def bytes_of(tensor: Any) -> bytes:
    import torch

    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with checkpoint_fleet(tmp_path, 0) as running:
        yield running


def start_vllm(fleet: LocalFleet, engine_id: str, model: Path, **settings: Any) -> None:
    vllm = tiny_settings(model)
    start_engine(fleet, engine_id, backend="vllm", vllm=vllm, **settings)


async def generate(fleet: LocalFleet, engine_id: str, count: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Greedy tokens, and spans as (number, start, end)."""
    view = await fleet.engine(engine_id)
    stub: Any = rollout_pb2_grpc.RolloutStub(fleet.channel(view.endpoint))
    sampling = rollout_pb2.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    request = rollout_pb2.GenerateRequest(run_id=RUN, model="policy", prompt_token_ids=PROMPT, sampling=sampling)
    tokens: list[int] = []
    finish = rollout_pb2.Finish()
    async for response in stub.Generate(request, timeout=150):
        tokens += response.token_ids
        finish = response.finish
    return tokens, [(s.version.number, s.start, s.end) for s in finish.spans]


async def begin(fleet: LocalFleet, layout: Layout) -> fleet_pb2.BeginUpdateResponse:
    request = fleet_pb2.BeginUpdateRequest(
        run_id=RUN,
        model="policy",
        term=fleet.term,
        request_id=uuid.uuid4().hex,
        layout_digest=layout.digest,
        byte_count=layout.byte_count,
    )
    response: fleet_pb2.BeginUpdateResponse = await fleet.fleet.BeginUpdate(request, timeout=PATIENCE_SECONDS)
    return response


def written(
    root: Path, version: version_pb2.WeightVersion, layout: Layout, state: Mapping[str, Any]
) -> CheckpointManifest:
    return write_checkpoint(
        root,
        NAME,
        run_id=RunId(RUN),
        model=ModelName("policy"),
        version=WeightVersion(version.number, Term(version.term)),
        step=None,
        layout=layout,
        content_digest=content_digest([xxhash.xxh3_64_digest(bytes_of(t)) for t in state.values()]),
        tensors=((name, bytes_of(t)) for name, t in state.items()),
        shard_bytes=200_000,
    )


async def push(fleet: LocalFleet, state: Mapping[str, Any]) -> CheckpointManifest:
    """A trainer that writes a checkpoint first and has every engine read it; then it is committed, and published."""
    layout = layout_of(state)
    begun = await begin(fleet, layout)
    manifest = written(checkpoint_root(fleet), begun.version, layout, state)
    head = weight_update_pb2.Manifest(
        layout_digest=layout.digest, tensor_count=len(layout.tensors), byte_count=layout.byte_count
    )
    (assignment,) = begun.plan.assignments
    stream: Stream = fleet.stream(
        begun,
        assignment.engine.engine_id,
        manifest=head,
        transport=weight_update_pb2.TRANSPORT_CHECKPOINT,
        checkpoint=NAME,
    )
    await stream.open()
    assert (await stream.read()).WhichOneof("frame") == "ready"
    await fleet.go(begun.update_id)
    commit = weight_update_pb2.Commit(
        version=begun.version,
        chunk_count=len(manifest.files),
        byte_count=layout.byte_count,
        content_digest=manifest.content_digest,
    )
    await stream.send(commit=commit)
    assert (await fleet.decided(begun.update_id)).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    await publish(fleet, NAME, manifest)
    return manifest


async def test_a_vllm_engine_that_joins_speaks_the_served_version_and_the_trainer_is_gone(
    fleet: LocalFleet, models: tuple[Path, Path]
) -> None:
    loaded, trained = models
    state = read_state(trained)
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    start_engine(fleet, "e0", {"tensors": shapes, "dtype": DType.F32})
    await fleet.wait_for_engines(1)
    manifest = await push(fleet, state)
    assert len(manifest.files) > 2
    fleet._trainer.cancel()
    start_vllm(fleet, "joiner", loaded)
    await eventually(lambda: _routable(fleet, "joiner"), within=START_SECONDS)
    status = await fleet.status("joiner")
    assert (status.applied.number, status.content_digest) == (1, manifest.content_digest)
    tokens, spans = await generate(fleet, "joiner", 12)
    assert tokens == Reference(loaded).greedy(state, PROMPT, 12)[0]
    assert spans == [(1, 0, 12)]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await Person(fleet, "joiner").sleep()
    assert from_rpc_error(error.value).reason == "UNSUPPORTED_BY_ENGINE"
    assert (await generate(fleet, "joiner", 12))[0] == tokens


async def _routable(fleet: LocalFleet, engine_id: str) -> bool:
    return any(v.status.engine.engine_id == engine_id and v.routable for v in (await fleet.view()).engines)


@pytest.mark.slow
async def test_a_vllm_engine_of_a_frozen_model_serves_what_it_loaded_as_number_0(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    model, _ = models
    fleet = LocalFleet(tmp_path)
    try:
        await fleet.start_coordinator()
        start_vllm(fleet, "teacher", model, initial="serve")
        await eventually(lambda: _routable(fleet, "teacher"), within=START_SECONDS)
        state = read_state(model)
        status = await fleet.status("teacher")
        expected = content_digest([xxhash.xxh3_64_digest(bytes_of(state[n])) for n in sorted(state)])
        assert (status.content_digest, status.frozen) == (expected, True)
        tokens, spans = await generate(fleet, "teacher", 12)
        assert tokens == Reference(model).greedy(state, PROMPT, 12)[0]
        assert spans == [(0, 0, 12)]
        fleet.term = 1
        stream = await open_directly(fleet, "teacher", WeightVersion(1, Term(1)))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.open()
        assert from_rpc_error(error.value).reason == "MODEL_FROZEN"
        start_engine(fleet, "other", initial="serve")
        assert await fleet.tasks.pop("other") == ExitCode.CONFIG
        await routable(fleet, "teacher", 0)
        assert (await fleet.engine("teacher")).status.applied == version_pb2.WeightVersion(term=0, number=0)
    finally:
        await fleet.close()

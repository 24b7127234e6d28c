"""The checkpoint transport over real gRPC: what is read is what the manifest says, or a refusal that harms nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.checkpoints import MANIFEST_NAME, CheckpointManifest
from controlplane.core.layout import DType, Layout, TensorSpec
from controlplane.core.versions import ModelName, RunId, Term, WeightVersion
from controlplane.rpc.errors import from_rpc_error
from tests.support.checkpoint_fleet import (
    EngineProcess,
    Person,
    checkpoint_fleet,
    checkpoint_root,
    open_directly,
    words_of,
    write,
)
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.local_fleet import LocalFleet, local_fleet
from tests.support.refusals import ended_by
from tests.support.writer import LAYOUT, Stream, Weights
from weightplane.v1 import engine_pb2, fleet_pb2, weight_update_pb2

NAME = "policy-9"
VERSION = WeightVersion(9, Term(1))


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with checkpoint_fleet(tmp_path, 1) as running:
        yield running


async def opened(fleet: LocalFleet, version: WeightVersion = VERSION, **changed: Any) -> Stream:
    """A stream that names the checkpoint; not sent yet."""
    values = {"transport": weight_update_pb2.TRANSPORT_CHECKPOINT, "checkpoint": NAME}
    return await open_directly(fleet, "e0", version, **values | changed)


async def refused(stream: Stream) -> str:
    """The reason with which it is refused, at its open frame or later."""
    await stream.send(open=stream._opened)
    return await ended_by(stream)


async def commit(stream: Stream, manifest: CheckpointManifest, **changed: Any) -> None:
    values: dict[str, Any] = {
        "version": stream.version,
        "chunk_count": len(manifest.files),
        "byte_count": manifest.layout.byte_count,
        "content_digest": manifest.content_digest,
    }
    await stream.send(commit=weight_update_pb2.Commit(**values | changed))


async def test_a_version_comes_from_a_checkpoint_without_a_chunk(fleet: LocalFleet) -> None:
    weights = Weights()
    manifest = write(checkpoint_root(fleet), NAME, weights, VERSION)
    for number, layout_was_known in ((9, False), (10, True)):
        stream = await opened(fleet, WeightVersion(number, Term(1)))
        accepted = await stream.open()
        assert (accepted.layout_needed, accepted.attached) == (False, False), layout_was_known
        assert (await stream.read()).WhichOneof("frame") == "ready"
        if layout_was_known:
            shutil.rmtree(checkpoint_root(fleet) / NAME)  # its files stay readable
        await commit(stream, manifest)
        applied = (await stream.read()).applied
        assert (applied.version.number, applied.content_digest) == (number, weights.digest)
        status = await fleet.status("e0")
        assert (status.applied.number, status.content_digest) == (number, weights.digest)
        assert status.update.bytes_received == LAYOUT.byte_count


async def test_the_same_attempt_again_after_its_commit_attaches_and_reads_nothing(fleet: LocalFleet) -> None:
    manifest = write(checkpoint_root(fleet), NAME, Weights(), VERSION)
    stream = await opened(fleet, update_id="u")
    await stream.open()
    await stream.read()
    await commit(stream, manifest)
    assert (await stream.read()).WhichOneof("frame") == "applied"
    shutil.rmtree(checkpoint_root(fleet) / NAME)
    again = await opened(fleet, update_id="u")
    assert (await again.open()).attached
    assert (await again.read()).WhichOneof("frame") == "applied"


# ---- refusals -----------------------------------------------------------------------------------


def _files(root: Path) -> list[Path]:
    return sorted((root / NAME).glob("*.safetensors"))


def _no_directory(root: Path) -> None:
    shutil.rmtree(root / NAME)


def _link_out_of_the_root(root: Path) -> None:
    (root / NAME).rename(root.parent / "outside")
    (root / NAME).symlink_to(root.parent / "outside")


def _linked_file(root: Path) -> None:
    file = _files(root)[0]
    file.rename(root.parent / "outside.safetensors")
    file.symlink_to(root.parent / "outside.safetensors")


def _missing_file(root: Path) -> None:
    _files(root)[1].unlink()


def _truncated(root: Path) -> None:
    os.truncate(_files(root)[0], _files(root)[0].stat().st_size - 1)


def _other_bytes(root: Path) -> None:
    with _files(root)[1].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def _swapped_files(root: Path) -> None:
    """Each is whole; together they are another layout's order, which is none of the reader's business."""
    manifest = root / NAME / MANIFEST_NAME
    content = json.loads(manifest.read_text())
    content["files"].reverse()
    manifest.write_text(json.dumps(content))


def _lying_digest(root: Path) -> None:
    manifest = root / NAME / MANIFEST_NAME
    content = json.loads(manifest.read_text())
    content["content_digest"] = "00" * 32
    manifest.write_text(json.dumps(content))


def _no_manifest(root: Path) -> None:
    (root / NAME / MANIFEST_NAME).write_text("not JSON")


def _of_another(**changed: Any) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        shutil.rmtree(root / NAME)
        write(root, NAME, Weights(), VERSION, **changed)

    return spoil


def _of_another_layout(root: Path) -> None:
    layout = Layout((TensorSpec("a", DType.F32, (1000,)), TensorSpec("b", DType.F32, (5, 3))))
    shutil.rmtree(root / NAME)
    write(root, NAME, Weights(), VERSION, layout=layout)


UNREADABLE = "CHECKPOINT_UNREADABLE"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_no_directory, UNREADABLE),
        (_link_out_of_the_root, UNREADABLE),
        (_linked_file, UNREADABLE),
        (_missing_file, UNREADABLE),
        (_truncated, UNREADABLE),
        (_other_bytes, "CHECKSUM_MISMATCH"),
        (_lying_digest, UNREADABLE),
        (_no_manifest, UNREADABLE),
        (_of_another(run_id=RunId("another")), UNREADABLE),
        (_of_another(model=ModelName("critic")), UNREADABLE),
        (_of_another_layout, UNREADABLE),
    ],
)
async def test_a_checkpoint_that_is_not_what_it_says_is_refused_and_the_engine_serves_on(
    fleet: LocalFleet, spoil: Callable[[Path], None], reason: str
) -> None:
    weights = Weights()
    await fleet.push(weights)
    root = checkpoint_root(fleet)
    write(root, NAME, Weights(), VERSION)
    spoil(root)
    before = len(os.listdir("/proc/self/fd"))
    assert await refused(await opened(fleet)) == reason
    status = await fleet.status("e0")
    assert (status.applied.number, status.word) == (1, "serving")
    assert (status.update.stage, status.update.error_reason) == (engine_pb2.UPDATE_STAGE_ABORTED, reason)
    assert (status.refused.version.number, status.refused.reason) == (9, reason)
    assert (await fleet.generate("e0", 4))[:2] == (words_of(weights), [(1, 0, 4)])
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)  # the call's own
    assert (await fleet.push(Weights())).phase == fleet_pb2.UPDATE_PHASE_COMMITTED


async def test_files_may_come_in_any_order(fleet: LocalFleet) -> None:
    weights = Weights()
    manifest = write(checkpoint_root(fleet), NAME, weights, VERSION)
    _swapped_files(checkpoint_root(fleet))
    stream = await opened(fleet)
    await stream.open()
    await stream.read()
    await commit(stream, manifest)
    assert (await stream.read()).applied.content_digest == weights.digest


@pytest.mark.parametrize("name", ["", "../outside", "a/b", ".hidden"])
async def test_a_name_that_could_leave_the_root_is_refused_by_the_schema_or_the_agent(
    fleet: LocalFleet, name: str
) -> None:
    assert await refused(await opened(fleet, checkpoint=name)) in ("INVALID_MESSAGE", UNREADABLE)


async def test_an_agent_without_a_root_reads_no_checkpoints(tmp_path: Path) -> None:
    async with local_fleet(tmp_path, engines=1) as fleet:
        await fleet.push(Weights())
        assert await refused(await opened(fleet)) == "UNSUPPORTED_BY_ENGINE"
        assert (await fleet.status("e0")).refused.reason == "UNSUPPORTED_BY_ENGINE"
        assert (await fleet.generate("e0", 3))[1] == [(1, 0, 3)]


async def test_an_announced_layout_that_the_engine_does_not_have_is_refused_as_from_any_writer(
    tmp_path: Path,
) -> None:
    async with checkpoint_fleet(tmp_path, 1, {"tensors": {"a": (1000,), "b": (3, 5), "c": (1,)}}) as fleet:
        write(checkpoint_root(fleet), NAME, Weights(), VERSION)
        assert await refused(await opened(fleet)) == "MANIFEST_INCOMPLETE"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"content_digest": bytes(32)}, "CHECKSUM_MISMATCH"),
        ({"chunk_count": 1}, "BYTE_COUNT_MISMATCH"),
        ({"byte_count": 4}, "BYTE_COUNT_MISMATCH"),
    ],
)
async def test_v5_a_commit_that_states_another_content_is_refused(
    fleet: LocalFleet, changed: dict[str, Any], reason: str
) -> None:
    manifest = write(checkpoint_root(fleet), NAME, Weights(), VERSION)
    stream = await opened(fleet)
    await stream.open()
    await stream.read()
    await commit(stream, manifest, **changed)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stream.read()
    assert from_rpc_error(error.value).reason == reason
    assert await fleet.applied("e0") is None


async def test_a_writer_that_sends_chunks_all_the_same_is_refused(fleet: LocalFleet) -> None:
    write(checkpoint_root(fleet), NAME, Weights(), VERSION)
    stream = await opened(fleet)
    await stream.open()
    await stream.read()
    await stream.chunk(Weights(), 0, [0, 1])
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stream.read()
    assert from_rpc_error(error.value).reason == "FRAME_OUT_OF_ORDER"


# ---- while it reads -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["abort", "end", "cut", "sleep", "takeover"])
async def test_inv3_what_ends_a_stream_ends_it_also_while_the_agent_reads(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    weights = Weights()
    await fleet.push(weights)
    write(checkpoint_root(fleet), NAME, Weights(), VERSION)
    before, hung = len(os.listdir("/proc/self/fd")), HungDisk(monkeypatch)
    stream = await opened(fleet)
    await stream.open()
    await eventually(lambda: hung.reading)
    reason = "UPDATE_ABORTED"
    if how == "abort":
        await stream.send(abort=weight_update_pb2.Abort(version=stream.version, reason="changed my mind"))
    elif how == "end":
        await stream.end()
    elif how == "cut":
        stream.cut()
    elif how == "sleep":
        await Person(fleet, "e0").sleep()
        reason = "ENGINE_ASLEEP"
    else:
        await fleet.take_lease(takeover=True, trainer_id="successor")
        reason = "STALE_TERM"
    if how != "cut":
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert from_rpc_error(error.value).reason == reason

    async def ended() -> bool:
        update = (await fleet.status("e0")).update
        return (update.stage, update.error_reason) == (engine_pb2.UPDATE_STAGE_ABORTED, reason)

    await eventually(ended)
    hung.answers()
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)
    if how == "sleep":
        await Person(fleet, "e0").wake()
    assert (await fleet.generate("e0", 4))[:2] == (words_of(weights), [(1, 0, 4)])


async def test_reading_may_take_longer_than_a_writers_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with checkpoint_fleet(tmp_path, 1, stream_idle_seconds=0.5) as fleet:
        manifest = write(checkpoint_root(fleet), NAME, Weights(), VERSION)
        hung = HungDisk(monkeypatch)
        stream = await opened(fleet)
        await stream.open()
        await eventually(lambda: hung.reading)
        await asyncio.sleep(0.7)  # this fleet's engine takes 0.5 s of silence for an end
        hung.answers()
        assert (await stream.read()).WhichOneof("frame") == "ready"
        await commit(stream, manifest)
        assert (await stream.read()).WhichOneof("frame") == "applied"


class HungDisk:
    """The next read of a checkpoint's bytes does not return before it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import threading

        from engine_agent.receivers.checkpoint import CheckpointReceiver

        self.reading = False
        self._go = threading.Event()
        read = CheckpointReceiver._read

        def slow(receiver: Any, *args: Any) -> bytes:
            self.reading = True
            self._go.wait(PATIENCE_SECONDS)
            return read(receiver, *args)

        monkeypatch.setattr(CheckpointReceiver, "_read", slow)

    def answers(self) -> None:
        self._go.set()


async def test_an_agent_killed_while_it_reads_leaves_the_checkpoint_and_comes_back(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path, 0) as fleet:
        engine = await EngineProcess.start(fleet, "e0")
        await fleet.wait_for_engines(1)
        weights = Weights()
        write(checkpoint_root(fleet), NAME, weights, VERSION)
        (engine.points / "engine.between_chunks").write_text("kill")
        stream = await opened(fleet)
        await stream.open()
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
        assert await engine.ended() == -9
        shutil.rmtree(engine.points)
        engine = await EngineProcess.start(fleet, "e0")

        async def is_back() -> bool:
            view = await fleet.engine("e0")
            return view.known and view.status.word == "empty"

        await eventually(is_back)
        stream = await opened(fleet)
        await stream.open()
        assert (await stream.read()).WhichOneof("frame") == "ready"
        stream.cut()
        assert await engine.stop() == 0


async def test_an_agent_whose_disk_hangs_still_ends_when_it_is_told_to(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path, 0) as fleet:
        engine = await EngineProcess.start(fleet, "e0")
        await fleet.wait_for_engines(1)
        write(checkpoint_root(fleet), NAME, Weights(), VERSION)
        (engine.points / "engine.reading_checkpoint").write_text("sleep=60")
        stream = await opened(fleet)
        await stream.open()
        await eventually(lambda: not (engine.points / "engine.reading_checkpoint").exists())
        assert (await fleet.status("e0")).word == "receiving"  # its loop is not held up
        assert await engine.stop() == 0

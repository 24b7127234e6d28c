"""A real vLLM engine whose worker reads chunks out of exported device memory: a twin of it, since no GPU is needed so.

The sender's ring, the agent's messages and the worker's half are the real ones; `tests/gpu` has the real memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from controlplane.core.assembly import Record
from controlplane.core.errors import InstallFailed, IpcNotPossible
from controlplane.core.sampling import SamplingSettings
from controlplane.device_memory.ranges import ExportedRange
from engine_agent.engine import DeviceChunk, StagedPart
from engine_agent.vllm.engine import VllmEngine, VllmSettings
from engine_agent.vllm.settings import engine_arguments
from tests.support.staging import layout_of, stage
from tests.support.tiny_model import make_tiny_model
from tests.support.twin_devices import TwinMemory
from tests.support.twin_vllm_worker import CLASS
from trainer_agent.chunking import plan_segment
from trainer_agent.rank.cuda_ipc import DeviceRing
from trainer_agent.rank.exporter import Exporter
from trainer_agent.rank.memory import RingMemory, ring_bytes, room_bytes

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
PROMPT, CHUNK_BYTES = [5, 6, 7, 8, 9], 64 * 1024
State = Mapping[str, Any]


class Rig:
    def __init__(self, engine: VllmEngine, uuid: str, states: tuple[State, State]) -> None:
        self.engine = engine
        self.uuid = uuid
        self.states = states

    async def says(self, name: str) -> list[int]:
        await self.engine.canary()
        await self.engine.resume()
        tokens: list[int] = []
        async for delta in self.engine.generate(name, PROMPT, SamplingSettings(max_tokens=12, temperature=0.0)):
            tokens += delta.token_ids
        await self.engine.quiesce()
        return tokens

    async def whole(self, which: int, label: str) -> None:
        with stage(self.states[which], label) as staged:
            await self.engine.install(staged)

    async def by_device(self, which: int, label: str, *, spoil: bool = False) -> int:
        """As a push would: chunk by chunk through two halves, each written again at once. How many chunks."""
        state = self.states[which]
        layout = layout_of(state)
        plan = plan_segment(layout, CHUNK_BYTES)
        ring = DeviceRing(TwinMemory(), room_bytes(plan), self.uuid)
        host = bytearray(ring_bytes(plan))
        try:
            await self.engine.open_exports([ring.probe])
            await self.engine.begin_streaming(layout, label)
            exporter = Exporter(layout, plan, RingMemory(plan, memoryview(host), lambda index: None))
            for chunk in exporter.chunks(iter(state.items())):
                data = torch.frombuffer(host, dtype=torch.uint8)[chunk.start : chunk.start + chunk.byte_count].clone()
                if spoil and chunk.index == 1:
                    data[0] ^= 1
                await self.engine.install_part(part_of(chunk, ring.write(chunk.index, data)))
            await self.engine.finish_streaming()
            return len(plan.chunks)
        finally:
            await self.engine.open_exports(())
            ring.free()


def part_of(chunk: Any, r: ExportedRange) -> StagedPart:
    records = [_record(x) for x in chunk.records]
    checksums = {x.tensor: x.checksum for x in records if x.checksum is not None}
    return StagedPart({}, list(checksums), (), DeviceChunk({r.device_uuid: r}, records, checksums))


def _record(x: Any) -> Record:
    return Record(x.tensor, x.tensor_offset, x.buffer_offset, x.byte_count, x.checksum or None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    from safetensors.torch import load_file

    directory: Path = tmp_path_factory.mktemp("models")
    models = [make_tiny_model(directory / str(seed), seed) for seed in range(2)]
    settings = VllmSettings(
        model=models[0],
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=32 << 20,
    )
    engine = VllmEngine(settings, "e0")
    with pytest.MonkeyPatch.context() as patch:
        extended = {"worker_extension_cls": CLASS}
        arguments = lambda settings, **how: engine_arguments(settings, **how) | extended  # noqa: E731
        patch.setattr("engine_agent.vllm.launch.engine_arguments", arguments)
        facts = await engine.start()
    await engine.quiesce()
    yield Rig(engine, facts.device_uuids[0], tuple(load_file(m / "model.safetensors") for m in models))
    await engine.shutdown()


async def test_what_came_by_device_memory_speaks_as_what_was_installed_whole(rig: Rig) -> None:
    await rig.whole(1, "1")
    expected = await rig.says("whole")
    await rig.whole(0, "2")
    assert await rig.says("other") != expected
    assert await rig.by_device(1, "3") > 4, "the halves were written again"
    assert await rig.says("by device") == expected


async def test_a_byte_that_changed_in_device_memory_fails_the_install_and_the_next_one_heals(rig: Rig) -> None:
    await rig.whole(1, "4")
    expected = await rig.says("before")
    with pytest.raises(InstallFailed, match="the bytes received have checksum") as failure:
        await rig.by_device(0, "5", spoil=True)
    assert failure.value.touched
    await rig.by_device(1, "6")
    assert await rig.says("healed") == expected


async def test_a_worker_that_finds_other_bytes_in_the_probe_says_so_before_anything_is_touched(rig: Rig) -> None:
    await rig.whole(1, "7")
    expected = await rig.says("kept")
    ring = DeviceRing(TwinMemory("elsewhere"), 4096, rig.uuid)
    with pytest.raises(IpcNotPossible, match=r"worker 0: .*invalid resource handle"):
        await rig.engine.open_exports([ring.probe])
    ring.free()
    assert await rig.says("still kept") == expected

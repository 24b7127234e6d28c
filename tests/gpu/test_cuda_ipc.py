"""Device memory between two processes of one GPU: torch alone, without vLLM. The ring and the probe, and a whole push.

NOT RUN on hosts without a CUDA device: it says so and skips.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash

from controlplane.device_memory.cuda import CudaMemory
from controlplane.device_memory.ranges import ExportedProbe, ExportedRange
from controlplane.rpc.metrics import SENT_BYTES
from engine_agent.daemon import building
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.memory.engine import MemorySettings
from engine_agent.vllm.cuda_ipc import OpenedExports
from tests.support.local_fleet import RUN
from tests.support.thread_rank import Source, ThreadRank, tokens_of
from tests.support.toy_rank import SHAPES, tensors_of
from tests.support.toy_trainer import fleet_for_toys, toy_trainer
from tests.support.twin_worker import TwinEngine
from trainer_agent.rank.cuda_ipc import DeviceRing
from trainer_agent.rank.devices import current_device

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch built for CUDA"),
    pytest.mark.timeout(180),
]
ROOM_BYTES = 4 << 20


def test_chunks_in_both_halves_are_read_by_another_process_byte_for_byte() -> None:
    ring = DeviceRing(CudaMemory(), ROOM_BYTES, current_device())
    reader = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.test_cuda_ipc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(json.dumps(ring.probe.told()) + "\n")
    for index in range(5):  # halves are written again, and opened only once
        data = torch.randint(0, 256, (ROOM_BYTES - index,), dtype=torch.uint8)
        reader.stdin.write(json.dumps(ring.write(index, data).told()) + "\n")
        reader.stdin.flush()
        assert reader.stdout.readline().strip() == xxhash.xxh3_64_hexdigest(data.numpy().data)
    reader.stdin.close()
    assert reader.wait(60) == 0
    ring.free()


class CudaEngine(TwinEngine):
    """In memory, with a worker that opens the real thing."""

    memory = CudaMemory


async def test_a_push_goes_through_device_memory_and_arrives_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "MemoryEngine", CudaEngine)
    async with fleet_for_toys(tmp_path, engines=0) as fleet:
        settings = EngineSettings(
            engine_id="e0",
            coordinator=fleet.address,
            run_id=RUN,
            state_dir=fleet.directory / "engines",
            backend="memory",
            memory=MemorySettings(tensors=SHAPES, device_uuids=(current_device(),)),
            apply="streaming",
        )
        fleet._start("e0", run_engine, settings)
        await fleet.wait_for_engines(1)
        async with toy_trainer(fleet.address) as trainer:
            rank = await ThreadRank.join(trainer.directory / "ranks.sock", Source(tensors_of))
            for step in (1, 2, 3):
                await fleet.settled()
                before = SENT_BYTES.labels("cuda_ipc")._value.get()
                assert (await rank.push(step)).outcomes == {"e0": "APPLIED"}
                tokens, _, _ = await fleet.generate("e0", 4)
                assert tokens == tokens_of(tensors_of(step), 4)
                assert SENT_BYTES.labels("cuda_ipc")._value.get() > before
            await rank.close()


def main() -> None:
    """The other process: a probe, then a range a line in, a checksum a line out."""
    opened = OpenedExports(CudaMemory(), "e0")
    opened.open(ExportedProbe.heard(json.loads(sys.stdin.readline())))
    for line in sys.stdin:
        data = opened.view(ExportedRange.heard(json.loads(line)))
        print(xxhash.xxh3_64_hexdigest(data.cpu().numpy().data), flush=True)
    opened.close()


if __name__ == "__main__":
    main()

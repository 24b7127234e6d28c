"""Device memory between two processes of one GPU: torch alone, without vLLM.

NOT RUN on hosts without a CUDA device: it says so and skips.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import xxhash

from controlplane.core.names import device_uuid
from engine_agent.vllm.cuda_ipc import OpenedBuffers
from trainer_agent.rank.cuda_ipc import DeviceRing
from weightplane.v1 import layout_pb2

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch built for CUDA"),
    pytest.mark.timeout(120),
]
ROOM_BYTES = 4 << 20


def test_chunks_in_both_halves_are_read_by_another_process_byte_for_byte() -> None:
    uuid = device_uuid(str(torch.cuda.get_device_properties(0).uuid))
    ring = DeviceRing(ROOM_BYTES, torch.device("cuda:0"), "e0", uuid)
    reader = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.test_cuda_ipc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    for index in range(5):  # halves are written again, and opened only once
        data = torch.randint(0, 256, (ROOM_BYTES - index,), dtype=torch.uint8)
        ring.memory[ring.place(index) : ring.place(index) + len(data)].copy_(data)
        torch.cuda.synchronize()
        reader.stdin.write(ring.range_of(index, len(data)).SerializeToString().hex() + "\n")
        reader.stdin.flush()
        assert reader.stdout.readline().strip() == xxhash.xxh3_64_hexdigest(data.numpy().tobytes())
    reader.stdin.close()
    assert reader.wait(60) == 0


def main() -> None:
    """The other process: a handle a line in, a checksum a line out."""
    opened = OpenedBuffers("e0")
    for line in sys.stdin:
        data = opened.bytes_of(layout_pb2.BufferHandle.FromString(bytes.fromhex(line.strip())))
        print(xxhash.xxh3_64_hexdigest(data.cpu().numpy().tobytes()), flush=True)
    opened.close()


if __name__ == "__main__":
    main()

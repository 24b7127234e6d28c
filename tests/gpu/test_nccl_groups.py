"""The groups of links with NCCL, across processes: one GPU for each member.

NOT RUN on hosts with fewer than two CUDA devices: it says so and skips.
"""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch

from controlplane import collectives

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, and torch built for CUDA"),
    pytest.mark.timeout(180),
]
BYTES = 8 << 20


def test_a_broadcast_between_gpus_carries_every_byte() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = collectives.serve_store("127.0.0.1", listener.detach(), port)
    other = subprocess.Popen([sys.executable, "-m", "tests.gpu.test_nccl_groups", str(port)])
    device = torch.device("cuda:0")
    group = collectives.Group(store, 0, 2, host="127.0.0.1", device=device)
    for value in range(3):
        collectives.end(group.broadcast(torch.full((BYTES,), value, dtype=torch.uint8, device=device)), lambda: None)
    assert other.wait(120) == 0
    group.close()


def main() -> None:
    """The receiver; its exit code says whether it got what was sent."""
    device = torch.device("cuda:1")
    store = collectives.open_store("127.0.0.1", int(sys.argv[1]), 30)
    group = collectives.Group(store, 1, 2, host="127.0.0.1", device=device)
    target = torch.empty(BYTES, dtype=torch.uint8, device=device)
    for value in range(3):
        collectives.end(group.broadcast(target), lambda: None)
        torch.cuda.synchronize(device)
        if not bool((target == value).all()):
            sys.exit(1)
    group.close()


if __name__ == "__main__":
    main()

"""A real vllm-router on this host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_port


@contextmanager
def vllm_router(*words: str, port: int | None = None, policy: str = "consistent_hash") -> Iterator[str]:
    """Its URL; it may need a moment until it answers. It knows the engines that `words` name, or none yet."""
    port = port or free_port()
    command = [str(Path(sys.executable).parent / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    more = ["--prometheus-port", str(free_port()), "--policy", policy, *words]
    process = subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)

"""The counter of real engines sees each once, whatever process started it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.support.engine_starts import EngineStarts
from tests.support.eventually import eventually_blocking


@contextmanager
def running(name: str) -> Iterator[None]:
    """A process below another one, under the name that vLLM gives itself."""
    process = psutil.Popen(["bash", "-c", f"(exec -a {name} sleep 60); true"])
    try:
        yield
    finally:
        for child in process.children():
            child.kill()
        process.wait()


def test_an_engine_core_below_another_process_is_counted_once() -> None:
    starts = EngineStarts()
    with running("VLLM::EngineCore"):
        eventually_blocking(lambda: starts.look() == 1)
        assert starts.look() == 1
        with running("VLLM::EngineCore_DP1"):
            eventually_blocking(lambda: starts.look() == 2)
    assert starts.look() == 2


def test_a_worker_is_no_engine() -> None:
    starts = EngineStarts()
    with running("VLLM::Worker"), running("VLLM::EngineCore"):
        eventually_blocking(
            lambda: "VLLM::Worker" in {p.cmdline()[0] for p in psutil.Process().children(recursive=True)}
        )
        eventually_blocking(lambda: starts.look() == 1)
        assert starts.look() == 1

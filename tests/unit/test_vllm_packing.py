"""Matrices are packed beside the load, all of them before anybody multiplies by one, or the load fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import pytest
import torch
from vllm import _custom_ops as ops

from engine_agent.vllm import packing

WEIGHTS = [torch.arange(n * 64, dtype=torch.float32).reshape(n, 64) / (n * 64) for n in (64, 96, 128, 160, 192)]


def load(weights: Iterable[torch.Tensor], ends_with: Exception | None = None) -> None:
    with packing.beside():
        for weight in weights:
            ops.create_onednn_mm(weight.t(), 32)
        if ends_with is not None:
            raise ends_with


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "has_cores", lambda: True)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is packed before it is set."""
    opened, plain = threading.Event(), packing._pack

    def when_open(handler: object, weight: torch.Tensor, size: int) -> None:
        assert opened.wait(10)
        plain(handler, weight, size)

    monkeypatch.setattr(packing, "_pack", when_open)
    yield opened
    opened.set()


def test_who_leaves_multiplies_by_every_matrix(gate: threading.Event) -> None:
    with packing.beside():
        handlers = [ops.create_onednn_mm(w.t(), 32) for w in WEIGHTS[: packing.WAITING]]
        threading.Timer(0.1, gate.set).start()
    x = torch.ones(2, 64)
    for handler, weight in zip(handlers, WEIGHTS, strict=False):
        torch.testing.assert_close(ops.onednn_mm(handler, x, None), x @ weight.t())


def test_no_second_model_waits_in_memory(gate: threading.Event) -> None:
    taken: list[int] = []

    def one_by_one() -> Iterator[torch.Tensor]:
        for index, weight in enumerate(WEIGHTS):
            yield weight
            taken.append(index)

    loading = threading.Thread(target=lambda: load(one_by_one()))
    loading.start()
    time.sleep(0.2)
    assert len(taken) <= packing.WAITING + 1, "one is in work"
    gate.set()
    loading.join(10)
    assert len(taken) == len(WEIGHTS)


def test_a_matrix_that_cannot_be_packed_is_the_loads_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(packing, "_pack", fail)
    plain = ops.create_onednn_mm
    with pytest.raises(RuntimeError, match="no memory"):
        load(WEIGHTS)
    assert ops.create_onednn_mm is plain


def test_what_is_computed_at_the_loads_end_waits_for_it(gate: threading.Event) -> None:
    with packing.beside() as all_packed:
        handler = ops.create_onednn_mm(WEIGHTS[0].t(), 32)
        threading.Timer(0.1, gate.set).start()
        all_packed()
        x = torch.ones(2, 64)
        torch.testing.assert_close(ops.onednn_mm(handler, x, None), x @ WEIGHTS[0].t())


def test_a_load_that_fails_leaves_no_thread_and_says_why_itself(gate: threading.Event) -> None:
    gate.set()
    plain, before = ops.create_onednn_mm, threading.active_count()
    with pytest.raises(ValueError, match="not loaded"):
        load(WEIGHTS, ends_with=ValueError("not loaded"))
    assert ops.create_onednn_mm is plain
    assert threading.active_count() == before


def test_on_one_core_vllm_packs_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "has_cores", lambda: False)
    plain = ops.create_onednn_mm
    with packing.beside():
        assert ops.create_onednn_mm is plain

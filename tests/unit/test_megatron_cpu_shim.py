"""When the CPU shim keeps its hands off. That it works is shown by the tests that train (integration)."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from trainer_agent.megatron import cpu_shim
from trainer_agent.megatron.cpu_shim import UnknownMegatron, install


def test_on_a_machine_with_a_gpu_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "megatron.core", None)  # importing it would fail
    before = torch.Tensor.cuda
    assert install() is False
    assert torch.Tensor.cuda is before


def test_a_megatron_that_is_not_known_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = ModuleType("megatron.core")
    unknown.__version__ = "0.99.0"  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "megatron.core", unknown)
    with pytest.raises(UnknownMegatron, match=r"0\.99\.0.*known: 0\.16\.1"):
        install()


def test_a_function_that_compares_with_no_cuda_type_has_changed_and_is_refused() -> None:
    def changed(tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.float32

    with pytest.raises(UnknownMegatron, match="changed"):
        cpu_shim._use_cpu_type_names(changed)


def test_cuda_type_names_become_the_cpus_also_inside_tuples() -> None:
    def known(name: str) -> bool:
        return name == "torch.cuda.FloatTensor" or name in ("torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor")

    cpu_shim._use_cpu_type_names(known)
    assert [known(n) for n in ("torch.FloatTensor", "torch.BFloat16Tensor", "torch.cuda.FloatTensor")] == [
        True,
        True,
        False,
    ]

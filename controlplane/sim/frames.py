"""What goes over an UpdateWeights stream, each way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from controlplane.core import engine_events as ee


def _nobody() -> None:
    pass


@dataclass
class Writer:
    """How a stream's answers reach who opened it."""

    accepted: Callable[[bool, bool], None]
    """Whether the layout is needed, whether it attached."""
    ready: Callable[[], None]
    applied: Callable[[], None]
    released: Callable[[], None] = _nobody
    """The next chunk of a streaming update is in the engine, and nobody reads it any more."""


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """`contents` are the bytes themselves: which weights each record's bytes are of."""

    event: Callable[[int], ee.ChunkArrived]
    contents: dict[int, int]

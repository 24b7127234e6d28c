"""Stages a state dict as an agent's receivers would: one packed file in /dev/shm, with its layout."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from controlplane.core.layout import DType, Layout, TensorSpec
from engine_agent.engine import Placement, SegmentSpan, StagedWeights

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64


def layout_of(state: Mapping[str, Any]) -> Layout:
    """The layout of a dict of torch tensors, in its order."""
    names = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}
    return Layout(
        tuple(TensorSpec(name, names[str(t.dtype).removeprefix("torch.")], tuple(t.shape)) for name, t in state.items())
    )


@contextlib.contextmanager
def stage(
    state: Mapping[str, Any], label: str, *, layout: Layout | None = None, device: str = ""
) -> Iterator[StagedWeights]:
    """The tensors of `state` packed into one chunk. The file is gone when the context ends."""
    layout = layout or layout_of(state)
    descriptor, path = tempfile.mkstemp(prefix="weightplane-test-", dir=SHARED_MEMORY)
    try:
        with os.fdopen(descriptor, "wb") as f:
            placements = [Placement(0, _append(f, state[t.name])) for t in layout.tensors]
            byte_count = f.tell()
        yield StagedWeights(layout, label, {device: [SegmentSpan(path, 0, byte_count)]}, placements)
    finally:
        os.unlink(path)


def _append(f: Any, tensor: Any) -> int:
    import torch

    f.write(b"\0" * (-f.tell() % ALIGNMENT))
    offset = int(f.tell())
    f.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return offset

"""What a sweep can do with each source besides comparing it: functions for `--hook MODULE:FUNCTION`.

A hook is called on every rank, with its source and the topology, and may use the source as a push does. It returns
facts, which JSON has to hold; an exception makes the topology fail.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from tests.sweep.topology import Topology
from trainer_agent.megatron.source import MegatronSource


def second_pass(source: MegatronSource, topology: Topology) -> dict[str, Any]:
    """A fresh pass, layer by layer: how many tensors, and a digest of all their bytes."""
    digest, count = hashlib.sha256(), 0
    for names, tensors in source.iter_groups():
        for name, tensor in zip(names, tensors, strict=True):
            digest.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            count += 1
    return {"names": count, "digest": digest.hexdigest(), "model": topology.model}

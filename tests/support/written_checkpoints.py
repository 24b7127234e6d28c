"""A small checkpoint of every kind of tensor: its layout, its bytes, written and read back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import xxhash

from controlplane.checkpoints import CheckpointManifest, open_files, write_checkpoint
from controlplane.core.layout import DType, Layout, Target, TargetKind, TensorSpec, Tie, content_digest
from controlplane.core.versions import ModelName, RunId, Term, WeightVersion

LAYOUT = Layout(
    (
        TensorSpec("flags", DType.BOOL, (3,)),
        TensorSpec("embed", DType.F32, (5, 7)),
        TensorSpec("nothing", DType.BF16, (0, 4)),
        TensorSpec("counter", DType.I64, ()),
        TensorSpec("head", DType.BF16, (9,), (Target(TargetKind.ADAPTER, "a"), Target())),
    ),
    (Tie("lm_head", "embed"),),
    "plain",
)
VERSION = WeightVersion(7, Term(2))
NAME = "policy-7"


def tensors_of(layout: Layout = LAYOUT, seed: int = 1) -> dict[str, bytes]:
    return {t.name: bytes((i * seed + k) % 2 for k in range(t.byte_count)) for i, t in enumerate(layout.tensors)}


def digest_of(tensors: dict[str, bytes]) -> bytes:
    return content_digest([xxhash.xxh3_64_digest(data) for data in tensors.values()])


def head(tensors: dict[str, bytes], **changed: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "run_id": RunId("run"),
        "model": ModelName("policy"),
        "version": VERSION,
        "step": 70,
        "layout": LAYOUT,
        "content_digest": digest_of(tensors),
        "shard_bytes": 64,
    }
    return values | changed


def write(root: Path, tensors: dict[str, bytes] | None = None, name: str = NAME, **changed: Any) -> CheckpointManifest:
    tensors = tensors_of() if tensors is None else tensors
    return write_checkpoint(root, name, tensors=tensors.items(), **head(tensors, **changed))


def read_back(root: Path, manifest: CheckpointManifest) -> dict[str, bytes]:
    found = {}
    for file in open_files(root, NAME, manifest):
        for index, stored in file.tensors:
            found[manifest.layout.tensors[index].name] = os.pread(file.descriptor, stored.byte_count, stored.offset)
        file.close()
    return found


def entries(root: Path) -> list[str]:
    return sorted(os.listdir(root))

"""What a checkpoint says of itself: `weightplane.json`, to and from its text. Pure.

A manifest that contradicts itself is refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from controlplane.core.errors import CheckpointUnreadable, LayoutInvalid
from controlplane.core.layout import (
    CHECKSUM_BYTES,
    MODEL_ONLY,
    DType,
    Layout,
    Target,
    TargetKind,
    TensorSpec,
    Tie,
    content_digest,
)
from controlplane.core.versions import ModelName, RunId, Term, WeightVersion

MANIFEST_NAME = "weightplane.json"
FORMAT_VERSION = 1
"""Grows when an older reader could misunderstand a manifest."""
MAX_FILES = 65536
"""As the contract's own limit."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Of a checkpoint, and of a file in it."""


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint is."""

    run_id: RunId
    model: ModelName
    version: WeightVersion
    step: int | None
    """The trainer's step, for people."""
    layout: Layout
    content_digest: bytes
    checksums: tuple[bytes, ...]
    """XXH3_64 of each tensor, in layout order."""
    files: tuple[str, ...]
    """Names of the safetensors files, in order."""


def parse(name: str, text: bytes) -> CheckpointManifest:
    """Raises CheckpointUnreadable."""
    try:
        return _manifest(name, json.loads(text))
    except LayoutInvalid as error:
        raise CheckpointUnreadable(name, f"{MANIFEST_NAME}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointUnreadable(name, f"{MANIFEST_NAME} is not understood: {error!r}") from error


def _manifest(name: str, content: dict[str, Any]) -> CheckpointManifest:
    if content["format_version"] != FORMAT_VERSION:
        raise CheckpointUnreadable(
            name, f"it has format version {content['format_version']!r}, this reads {FORMAT_VERSION}"
        )
    layout = _layout(content["layout"])
    checksums = tuple(bytes.fromhex(t["checksum"]) for t in content["layout"]["tensors"])
    version = content["version"]
    manifest = CheckpointManifest(
        run_id=RunId(_text(content["run_id"])),
        model=ModelName(_text(content["model"])),
        version=WeightVersion(number=_whole(version["number"]), term=Term(_whole(version["term"]))),
        step=None if content["step"] is None else _whole(content["step"]),
        layout=layout,
        content_digest=bytes.fromhex(content["content_digest"]),
        checksums=checksums,
        files=tuple(_text(f) for f in content["files"]),
    )
    _check_consistent(name, manifest, bytes.fromhex(content["layout_digest"]))
    return manifest


def _check_consistent(name: str, manifest: CheckpointManifest, layout_digest: bytes) -> None:
    files = manifest.files
    if manifest.layout.digest != layout_digest:
        raise CheckpointUnreadable(name, "its layout is not the one that its layout digest names")
    if any(len(c) != CHECKSUM_BYTES for c in manifest.checksums):
        raise CheckpointUnreadable(name, f"a checksum has {CHECKSUM_BYTES} bytes")
    if content_digest(manifest.checksums) != manifest.content_digest:
        raise CheckpointUnreadable(name, "its checksums are not those that its content digest names")
    if not 0 < len(files) <= MAX_FILES or len(set(files)) != len(files):
        raise CheckpointUnreadable(name, f"it names {len(files)} files, {len(set(files))} of them different")
    strange = [f for f in files if NAME.fullmatch(f) is None or f == MANIFEST_NAME]
    if strange:
        raise CheckpointUnreadable(name, f"that is no name of a file in it: {strange[0]!r}")


def _layout(content: dict[str, Any]) -> Layout:
    return Layout(
        tensors=tuple(_tensor(t) for t in content["tensors"]),
        ties=tuple(Tie(alias=_text(t["alias"]), source=_text(t["source"])) for t in content["ties"]),
        format=_text(content["format"]),
    )


def _tensor(content: dict[str, Any]) -> TensorSpec:
    targets = tuple(
        Target(kind=TargetKind(t["kind"]), adapter=_text(t.get("adapter", ""))) for t in content.get("targets", ())
    )
    return TensorSpec(
        name=_text(content["name"]),
        dtype=DType[content["dtype"]],
        shape=tuple(_whole(d) for d in content["shape"]),
        targets=targets or MODEL_ONLY,
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected a whole number, got {value!r}")
    return value


def to_json(manifest: CheckpointManifest) -> bytes:
    """As `parse` reads it."""
    content = {
        "format_version": FORMAT_VERSION,
        "run_id": manifest.run_id,
        "model": manifest.model,
        "version": {"term": manifest.version.term, "number": manifest.version.number},
        "step": manifest.step,
        "layout_digest": manifest.layout.digest.hex(),
        "content_digest": manifest.content_digest.hex(),
        "files": list(manifest.files),
        "layout": {
            "format": manifest.layout.format,
            "ties": [{"alias": t.alias, "source": t.source} for t in manifest.layout.ties],
            "tensors": [
                _tensor_to_json(t, c) for t, c in zip(manifest.layout.tensors, manifest.checksums, strict=True)
            ],
        },
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _tensor_to_json(tensor: TensorSpec, checksum: bytes) -> dict[str, object]:
    content: dict[str, object] = {
        "name": tensor.name,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "checksum": checksum.hex(),
    }
    if tensor.targets != MODEL_ONLY:
        content["targets"] = [{"kind": t.kind.value, "adapter": t.adapter} for t in tensor.targets]
    return content

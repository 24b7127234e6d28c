"""What a model directory says its weights are: safetensors headers and config.json, read without torch.

Promises names, shapes, dtypes and byte ranges that were checked against each other and against the files'
sizes. Refuses a directory that is missing, cut short, or contradicts itself, with CheckpointError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from controlplane.core.layout import FP8_BLOCK, PLAIN, DType, Expected, content_digest
from controlplane.tensor_files import StoredTensor, TensorFileError, read_file

__all__ = [
    "CheckpointError",
    "ModelFacts",
    "StoredTensor",
    "digest_of",
    "expected_of",
    "read_checkpoint",
    "read_model_facts",
]

READ_BYTES = 8 << 20
"""Read at once while a model's files are summed."""
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEAD_NAME = "lm_head.weight"

_ENGINE_DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16, "float64": DType.F64}
_CASTABLE = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
"""Element types between which vLLM casts on loading; others are taken only as the file has them."""


class CheckpointError(ValueError):
    """The model directory is missing, cut short, or contradicts itself."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What config.json says, as far as weights and requests are concerned."""

    vocab_size: int
    tied: bool
    """Whether the output head is the input embedding."""
    format: str
    """`plain`, the name of the quantization method, or `fp8-block` for that of 8-bit floats with a scale per block."""


def read_checkpoint(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model directory, by name."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    index = directory / INDEX_NAME
    if index.exists():
        return _read_sharded(directory, index)
    single = directory / SINGLE_NAME
    files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: holds no safetensors file")
    return _merged(files)


def read_model_facts(directory: Path, tensors: Mapping[str, StoredTensor]) -> ModelFacts:
    """Read config.json; `tensors` decides about a tie that it leaves unsaid."""
    path = directory / "config.json"
    config = _object(path, _read_text(path))
    text = config | _nested(config, "text_config")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if tied is None:
        tied = not any(_is_head(name) for name in tensors)
    vocab_size = text.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise CheckpointError(f"{path}: vocab_size is {vocab_size!r}")
    return ModelFacts(vocab_size, bool(tied), _format(_nested(config, "quantization_config")))


def _format(quantization: Mapping[str, Any]) -> str:
    method = str(quantization.get("quant_method", PLAIN))
    return FP8_BLOCK if method == "fp8" and quantization.get("weight_block_size") else method


def expected_of(tensors: Mapping[str, StoredTensor], facts: ModelFacts, engine_dtype: str) -> Expected:
    """What an update must cover: every stored tensor, in the file's dtype or the engine's (torch's name of it).

    A tied head and the rotary frequencies are known, but not needed.
    """
    configured = _ENGINE_DTYPES.get(engine_dtype)
    optional = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    if facts.tied:
        optional |= {HEAD_NAME} | {name for name in tensors if _is_head(name)}
    return Expected(
        shapes={name: t.shape for name, t in tensors.items()},
        dtypes={name: _accepted(t.dtype, configured) for name, t in tensors.items()},
        optional=frozenset(optional),
        format=facts.format,
    )


def digest_of(tensors: Mapping[str, StoredTensor]) -> bytes:
    """Content digest of a model directory, in the order of its tensors' names; reads every byte. Blocks."""
    return content_digest([_checksum(tensors[name]) for name in sorted(tensors)])


def _checksum(tensor: StoredTensor) -> bytes:
    checksum, left = xxhash.xxh3_64(), tensor.byte_count
    try:
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.offset)
            while left:
                block = file.read(min(left, READ_BYTES))
                if not block:
                    raise CheckpointError(f"{tensor.file}: cut short while it was read")
                checksum.update(block)
                left -= len(block)
    except OSError as e:
        raise CheckpointError(f"{tensor.file}: {e.strerror}") from e
    return checksum.digest()


def _accepted(stored: DType, configured: DType | None) -> frozenset[DType]:
    if configured is None or stored not in _CASTABLE:
        return frozenset({stored})
    return frozenset({stored, configured})


def _is_head(name: str) -> bool:
    return name == HEAD_NAME or name.endswith("." + HEAD_NAME)


def _read_sharded(directory: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = _nested(_object(index, _read_text(index)), "weight_map")
    if not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    tensors = _merged([directory / name for name in sorted({str(v) for v in weight_map.values()})])
    missing = sorted(name for name in weight_map if name not in tensors)
    if missing:
        raise CheckpointError(f"{index}: names tensors that no file holds: {', '.join(missing[:5])}")
    return {name: tensors[name] for name in weight_map}


def _merged(files: list[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    try:
        for file in files:
            for name, tensor in read_file(file):
                if name in tensors:
                    raise CheckpointError(f"{file}: {name} stands in {tensors[name].file.name} too")
                tensors[name] = tensor
    except TensorFileError as e:
        raise CheckpointError(str(e)) from e
    return tensors


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as e:
        raise CheckpointError(f"{path}: {e.strerror}") from e


def _object(path: Path, text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise CheckpointError(f"{path}: not JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def _nested(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}

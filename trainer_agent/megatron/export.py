"""A weight source into a Hugging Face model directory that any engine or transformers can load.

Written tensor by tensor, so that a model needs no second copy in memory; the directory appears whole or
not at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from trainer_agent.source import ParamMeta, WeightSource

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_HEADER_ALIGNMENT_BYTES = 8
"""The data of a safetensors file starts at a multiple of it."""


def export_hf(source: WeightSource, model_dir: Path | str, directory: Path | str, *, write: bool) -> None:
    """Write the source's weights, with the other files of `model_dir`, as `directory`, in place of what was there.

    A collective where the source is one: every rank calls it, and the one with `write` set writes.
    """
    if not write:
        for _ in source:
            pass
        return
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        _copy_companions(Path(model_dir), unfinished)
        _set_dtype(unfinished / "config.json", source.metadata())
        write_safetensors(source, unfinished / "model.safetensors")
        unfinished.chmod(0o755)
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_safetensors(source: WeightSource, file: Path) -> None:
    """One file, in the order of `source.metadata()`. Raises ValueError when the source yields anything else."""
    metadata = source.metadata()
    with file.open("wb") as out:
        _write_header(out, metadata)
        for declared, (name, tensor) in zip(metadata, source, strict=True):
            got = ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            if got != declared:
                raise ValueError(f"the source declared {declared} and yielded {got}")
            out.write(_bytes(tensor))
        out.flush()
        os.fsync(out.fileno())


def _write_header(out: BinaryIO, metadata: Sequence[ParamMeta]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in metadata:
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    out.write(len(text).to_bytes(8, "little") + text)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _copy_companions(model_dir: Path, directory: Path) -> None:
    """Config and tokenizer; not the old weights."""
    for file in model_dir.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copyfile(file, directory / file.name)


def _set_dtype(config_file: Path, metadata: Sequence[ParamMeta]) -> None:
    config = json.loads(config_file.read_text())
    widest = max((dtype for _, dtype, _ in metadata), key=lambda dtype: dtype.itemsize)
    config["dtype"] = config["torch_dtype"] = str(widest).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=1))

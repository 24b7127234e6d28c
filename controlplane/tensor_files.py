"""Files of tensors, in safetensors' format: read and written without torch, numpy or the safetensors library.

A file is eight bytes of little-endian length, that much JSON, and the tensors' bytes. Read: names, dtypes, shapes and
byte ranges, checked against each other and against the file's size. Written: a header made of specs alone, so that
bytes go to their places as they come and a file is never in memory. (The library's own writer, 0.8, wants the
addresses of all of a file's tensors at once.) Tensors lie in order of falling element size, so each is aligned for
its dtype, as the library aligns them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.core.layout import DType, TensorSpec

HEADER_LIMIT_BYTES = 100_000_000
"""safetensors' own limit on a header."""
_ALIGNMENT_BYTES = 8
"""Where the data begins; the largest element."""


class TensorFileError(ValueError):
    """The file is missing, cut short, or contradicts itself."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: `byte_count` bytes at `offset`, counted from the file's first byte."""

    file: Path
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    byte_count: int


def read_file(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a file, in its header's order. Raises TensorFileError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise TensorFileError(f"{file}: {e.strerror}") from e
    try:
        yield from read_descriptor(descriptor, file)
    finally:
        os.close(descriptor)


def read_descriptor(descriptor: int, file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """As `read_file`, of an open file; `file` is its name in words and results."""
    header, data_start, size = _read_header(descriptor, file)
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _stored(file, name, entry, data_start, size)


def _read_header(descriptor: int, file: Path) -> tuple[dict[str, Any], int, int]:
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT_BYTES):
            raise TensorFileError(f"{file}: not a safetensors file, or cut short ({size} bytes)")
        text = os.pread(descriptor, length, 8)
    except OSError as e:
        raise TensorFileError(f"{file}: {e.strerror}") from e
    try:
        header = json.loads(text)
    except ValueError as e:
        raise TensorFileError(f"{file}: not JSON: {e}") from e
    if not isinstance(header, dict):
        raise TensorFileError(f"{file}: expected a JSON object")
    return header, 8 + length, size


def _stored(file: Path, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    try:
        dtype = DType[entry["dtype"]]
        shape = tuple(int(d) for d in entry["shape"])
        begin, end = (int(v) for v in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as e:
        raise TensorFileError(f"{file}: {name}: the header is not understood: {e!r}") from e
    if begin < 0 or end - begin != math.prod(shape) * dtype.item_bytes:
        raise TensorFileError(f"{file}: {name}: {end - begin} bytes do not hold {dtype.name} of shape {shape}")
    if data_start + end > size:
        raise TensorFileError(f"{file}: cut short: {name} ends at byte {data_start + end} of {size}")
    return StoredTensor(file, dtype, shape, data_start + begin, end - begin)


def header_of(tensors: Sequence[TensorSpec]) -> tuple[bytes, list[int]]:
    """A file's first bytes, and where in it each tensor begins."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = [0] * len(tensors), 0
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].dtype.item_bytes):
        spec, begins[i] = tensors[i], end
        end += spec.byte_count
        entries[spec.name] = {
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            "data_offsets": [begins[i], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > HEADER_LIMIT_BYTES:
        raise TensorFileError(
            f"a header of {len(text)} bytes for {len(tensors)} tensors is more than safetensors takes"
        )
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + begin for begin in begins]

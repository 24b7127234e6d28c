"""Inside a vLLM worker: shared-memory chunks as tensors, without a copy.

Promises that each tensor is a view of the bytes that were named, checked for range and alignment before any is
made. Refuses to let go of memory that something still reads (INV-12): `close` raises then.

The mappings are private and copy-on-write: a loader that writes into a tensor in place can neither change the
sender's bytes nor be killed for writing to a read-only page. They outlive the update (`engine_agent.kept_maps`), since
to map a segment is a good part of what an install takes; one that a loader wrote into does not.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Sequence

import numpy as np
import torch

from engine_agent.kept_maps import KeptMaps, MappedFile

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the layout's names, which are safetensors'."""


class StagingError(ValueError):
    """Staged bytes are not what the layout says. Found before anything was touched."""


class MappedChunks:
    """The chunk list of one worker's device. `spans` are (path, offset, byte count)."""

    def __init__(self, spans: Sequence[tuple[str, int, int]], kept: KeptMaps | None = None) -> None:
        """`kept`: where mappings of earlier updates are found, and these go in the end; private ones."""
        self._spans = list(spans)
        self._kept = kept or KeptMaps(private=True)
        self._keeps = kept is not None
        self._files: dict[str, MappedFile] = {}
        self._views: dict[str, memoryview] = {}
        try:
            for path, offset, byte_count in self._spans:
                if offset < 0 or byte_count < 0 or offset + byte_count > self._map(path).size:
                    raise StagingError(f"{path}: bytes {offset} to {offset + byte_count} are not in the file")
        except BaseException:
            self.close()
            raise

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], chunk: int, offset: int) -> torch.Tensor:
        """A view of `shape` elements that begins `offset` bytes into chunk number `chunk`."""
        start = self.locate(dtype, shape, chunk, offset)
        byte_count = math.prod(shape) * dtype.itemsize
        if byte_count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        buffer = self._views[self._spans[chunk][0]]
        # Not torch.frombuffer: it does not keep the buffer exported, and `close` would pull the pages away.
        view = np.frombuffer(buffer, dtype=np.uint8, count=byte_count, offset=start)
        return torch.from_numpy(view).view(dtype).view(tuple(shape))

    def locate(self, dtype: torch.dtype, shape: Sequence[int], chunk: int, offset: int) -> int:
        """Where in its file the tensor begins. Raises StagingError if it is out of range or not aligned."""
        if not 0 <= chunk < len(self._spans):
            raise StagingError(f"chunk {chunk} of {len(self._spans)} is named")
        path, span_offset, span_bytes = self._spans[chunk]
        end = offset + math.prod(shape) * dtype.itemsize
        if offset < 0 or end > span_bytes:
            raise StagingError(f"bytes {offset} to {end} are not in chunk {chunk} of {span_bytes} bytes")
        if (span_offset + offset) % dtype.itemsize:
            raise StagingError(f"byte {span_offset + offset} of {path} is not aligned for {dtype}")
        return span_offset + offset

    def close(self) -> None:
        """Let go of everything. Raises BufferError if a tensor still reads one of the maps (INV-12)."""
        for path in list(self._views):
            try:
                self._views[path].release()
            except BufferError:
                gc.collect()  # a cycle in vLLM's load records may hold a view for no one
                self._views[path].release()
            del self._views[path]
        files, self._files = self._files, {}
        if not self._keeps:
            self._kept.close()
        self._kept.give_back(files.values())

    def _map(self, path: str) -> MappedFile:
        if path not in self._files:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as e:
                raise StagingError(f"{path}: {e.strerror}") from e
            try:
                self._files[path] = self._kept.take(descriptor)
            except (OSError, ValueError) as e:
                raise StagingError(f"{path}: cannot be mapped: {e}") from e
            self._views[path] = memoryview(self._files[path].map)
        return self._files[path]

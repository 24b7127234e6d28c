"""A delta: a copy of the base, in which what changed is overwritten. The base itself is only read.

What results is a whole version, checked tensor by tensor like any other, those too that the delta does not mention: a
base whose bytes went bad is not installed again. The memory is of the agent's own, so the result can be the next base.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from controlplane.core.assembly import INDEX_BYTES, Record
from controlplane.core.errors import ByteCountMismatch, FrameInvalid
from controlplane.core.layout import Layout
from engine_agent.engine import StagedWeights
from engine_agent.receivers.port import require_open
from engine_agent.receivers.staging import Staging

_BITS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_INDEX = np.dtype("<i4")


class PatchedStaging(Staging):
    """What receivers that copy put a delta into. The first chunk waits until the base was copied."""

    patched = True

    def __init__(self, layout: Layout, base: StagedWeights) -> None:
        """`base`: whole, of the same layout; it may be let go of once this returned. Raises LimitExceeded."""
        super().__init__(layout)
        self._base: _Base | None = _Base(base)

    def fill(self, guard: threading.Lock) -> None:
        """Tensor by tensor: between two of them an attempt that was ended is noticed."""
        if self._base is None:
            return
        for tensor, spec in enumerate(self.layout.tensors):
            start = self.offsets[tensor]
            with guard:
                require_open(self.closed)
                with self.view[start : start + spec.byte_count] as into:
                    self._base.read(tensor, into)
        with guard:
            self._let_go()

    def copy(self, records: Sequence[Record], data: memoryview) -> None:
        super().copy([r for r in records if r.changed_elements is None], data)
        for record in records:
            if record.changed_elements is not None:
                self._patch(record, data)

    def close(self) -> None:
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            base.close()

    def _patch(self, record: Record, data: memoryview) -> None:
        spec = self.layout.tensors[record.tensor]
        part = data[record.buffer_offset : record.buffer_offset + record.byte_count]
        if len(part) != record.byte_count:
            raise ByteCountMismatch(what="the chunk's buffer", expected=record.byte_count, got=len(part))
        start = self.offsets[record.tensor]
        with self.view[start + record.tensor_offset : start + spec.byte_count] as target:
            patch(target, part, record.changed_elements or 0, spec.dtype.item_bytes)


class _Base:
    """The base's files, open for as long as they are read."""

    def __init__(self, staged: StagedWeights) -> None:
        self._placements = staged.placements
        self._spans = staged.chunks[""]
        self._descriptors: list[int] = []
        try:
            for span in self._spans:
                self._descriptors.append(os.open(span.path, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise

    def read(self, tensor: int, into: memoryview) -> None:
        """Exactly as many bytes as there is room."""
        place = self._placements[tensor]
        descriptor, offset = self._descriptors[place.chunk], self._spans[place.chunk].offset + place.offset
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], offset + done)
            if not count:
                raise ByteCountMismatch(what="the base", expected=len(into), got=done)
            done += count

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def patch(target: memoryview, data: memoryview, count: int, item_bytes: int) -> None:
    """Write `count` elements into `target`: `data` has their indexes and then their values.

    Raises:
        FrameInvalid: the indexes do not rise, or leave the target. It is as it was then.
    """
    if not count:
        return
    bits, end = _BITS[item_bytes], len(target) // item_bytes
    indexes = np.frombuffer(data, _INDEX, count)
    if not _rise_within(indexes, end):
        raise FrameInvalid("TensorRecord", "changed_elements", f"indexes must rise, and stay below {end}")
    np.frombuffer(target, bits)[indexes] = np.frombuffer(data, bits, count, offset=INDEX_BYTES * count)


def _rise_within(indexes: npt.NDArray[np.int32], end: int) -> bool:
    return bool(indexes[0] >= 0 and indexes[-1] < end and np.all(indexes[1:] > indexes[:-1]))

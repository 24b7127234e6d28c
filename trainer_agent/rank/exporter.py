"""Turns a weight source into chunks of a shared-memory segment, each tensor checked before its bytes are written.

Promises: what the source states once (`metadata()`) is what each iteration yields, name by name, dtype by
dtype, shape by shape; a source that deviates is refused before the deviating tensor is written, and a push that is
given up never commits (INV-3). Every tensor's XXH3_64 rides on the record that completes it.

Refuses names that stand twice and dtypes that have no safetensors name, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash

from controlplane.core.errors import LayoutInvalid
from controlplane.core.layout import DType, Layout, TensorSpec, Tie, content_digest
from trainer_agent.chunking import SegmentPlan
from trainer_agent.source import WeightSource
from weightplane.v1 import weight_update_pb2 as pb

DTYPES: dict[torch.dtype, DType] = {
    torch.float64: DType.F64,
    torch.float32: DType.F32,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float8_e4m3fn: DType.F8_E4M3,
    torch.float8_e5m2: DType.F8_E5M2,
    torch.float8_e8m0fnu: DType.F8_E8M0,
    torch.int64: DType.I64,
    torch.int32: DType.I32,
    torch.int16: DType.I16,
    torch.int8: DType.I8,
    torch.uint8: DType.U8,
    torch.bool: DType.BOOL,
}
_TORCH = {d: t for t, d in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ExportedChunk:
    """A chunk whose bytes lie in the segment, at [start, start + byte_count)."""

    index: int
    start: int
    byte_count: int
    records: tuple[pb.TensorRecord, ...]


def layout_of(source: WeightSource) -> Layout:
    """The layout that a source states.

    Raises:
        LayoutInvalid: no tensor, a name that stands twice, a tie without source, or a dtype without a name.
    """
    metadata = source.metadata()
    if not metadata:
        raise LayoutInvalid(problem="the source states no tensor", names=[])
    nameless = [f"{m.name} ({m.dtype})" for m in metadata if m.dtype not in DTYPES]
    if nameless:
        raise LayoutInvalid(problem="a dtype cannot be sent", names=nameless)
    tensors = tuple(TensorSpec(m.name, DTYPES[m.dtype], tuple(m.shape)) for m in metadata)
    return Layout(tensors, tuple(Tie(alias, name) for alias, name in source.ties()))


class Exporter:
    """One iteration over a source, written into one segment."""

    def __init__(self, layout: Layout, plan: SegmentPlan, memory: memoryview) -> None:
        self._layout = layout
        self._plan = plan
        self._memory = memory
        self._checksums: list[bytes] = []

    @property
    def byte_count(self) -> int:
        """Bytes of all tensors; padding between them is not counted."""
        return self._layout.byte_count

    @property
    def content_digest(self) -> bytes:
        """Of everything that was exported; call it after the last chunk."""
        return content_digest(self._checksums)

    def chunks(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[ExportedChunk]:
        """Write each tensor as it is yielded, and yield each chunk as soon as all of its bytes lie there.

        Raises:
            LayoutInvalid: the source yields something else than it stated; the tensor is not written.
        """
        target = torch.frombuffer(self._memory, dtype=torch.uint8)
        cut = 0
        for index, (name, tensor) in enumerate(tensors):
            self._check(index, name, tensor)
            self._write(index, tensor, target)
            while cut < len(self._plan.chunks) and self._plan.chunks[cut].last_tensor <= index:
                yield self._chunk(cut)
                cut += 1
        missing = [t.name for t in self._layout.tensors[len(self._checksums) :]]
        if missing:
            raise LayoutInvalid(problem="the source ended without tensors that metadata() states", names=missing)

    def _check(self, index: int, name: str, tensor: torch.Tensor) -> None:
        if index >= len(self._layout.tensors):
            raise LayoutInvalid(problem="the source yields more tensors than metadata() states", names=[name])
        spec = self._layout.tensors[index]
        if name != spec.name:
            raise LayoutInvalid(problem=self._order_problem(index, name), names=[name])
        if tuple(tensor.shape) != spec.shape:
            problem = f"the source yields shape {tuple(tensor.shape)}, metadata() states {spec.shape}"
            raise LayoutInvalid(problem=problem, names=[name])
        if DTYPES.get(tensor.dtype) is not spec.dtype:
            problem = f"the source yields {tensor.dtype}, metadata() states {spec.dtype.name}"
            raise LayoutInvalid(problem=problem, names=[name])

    def _order_problem(self, index: int, name: str) -> str:
        if any(t.name == name for t in self._layout.tensors[:index]):
            return "the source yields a tensor twice"
        if any(t.name == name for t in self._layout.tensors):
            return f"the source leaves out {self._layout.tensors[index].name}, or yields in another order; it yields"
        return "the source yields a tensor that metadata() does not state"

    def _write(self, index: int, tensor: torch.Tensor, target: torch.Tensor) -> None:
        spec, offset = self._layout.tensors[index], self._plan.offsets[index]
        size = spec.byte_count
        if size:
            place = target[offset : offset + size].view(_TORCH[spec.dtype]).view(spec.shape)
            place.copy_(tensor.detach())
        self._checksums.append(bytes(xxhash.xxh3_64(self._memory[offset : offset + size]).digest()))

    def _chunk(self, index: int) -> ExportedChunk:
        chunk = self._plan.chunks[index]
        records = tuple(
            pb.TensorRecord(
                tensor=p.tensor,
                tensor_offset=p.tensor_offset,
                buffer_offset=p.segment_offset - chunk.start,
                byte_count=p.byte_count,
                checksum=self._checksums[p.tensor] if p.last else None,
            )
            for p in chunk.pieces
        )
        return ExportedChunk(index, chunk.start, chunk.end - chunk.start, records)

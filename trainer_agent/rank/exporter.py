"""Turns a weight source into chunks in memory, each tensor checked before its bytes are written.

Promises: what the source states once (`metadata()`) is what each iteration yields, name by name, dtype by
dtype, shape by shape; a source that deviates is refused before the deviating tensor is written, and a push that is
given up never commits (INV-3). Every tensor's XXH3_64 rides on the record that completes it. Beyond the memory that it
is given it needs none: a tensor that goes over chunks is copied and summed piece by piece.

Refuses names that stand twice and dtypes that have no safetensors name, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash

from controlplane.core.errors import LayoutInvalid
from controlplane.core.layout import MODEL_ONLY, PLAIN, DType, Layout, TensorSpec, Tie, content_digest
from trainer_agent.chunking import ChunkRange, Piece, SegmentPlan
from trainer_agent.rank.memory import ExportMemory, Place
from trainer_agent.source import SaysFormat, SaysTargets, WeightSource
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
    """A chunk whose bytes lie in the memory, at [start, start + byte_count)."""

    index: int
    start: int
    byte_count: int
    records: tuple[pb.TensorRecord, ...]
    segment: Place | None = None
    """Where they lie, if not in the push's own segment."""


def layout_of(source: WeightSource) -> Layout:
    """The layout that a source states.

    Raises:
        LayoutInvalid: no tensor, a dtype without a name, or what `Layout` refuses.
    """
    metadata = source.metadata()
    if not metadata:
        raise LayoutInvalid(problem="the source states no tensor", names=[])
    nameless = [f"{m.name} ({m.dtype})" for m in metadata if m.dtype not in DTYPES]
    if nameless:
        raise LayoutInvalid(problem="a dtype cannot be sent", names=nameless)
    targets = source.targets() if isinstance(source, SaysTargets) else {}
    tensors = (TensorSpec(m.name, DTYPES[m.dtype], tuple(m.shape), targets.get(m.name, MODEL_ONLY)) for m in metadata)
    ties = tuple(Tie(alias, name) for alias, name in source.ties())
    return Layout(tuple(tensors), ties, source.weights_format if isinstance(source, SaysFormat) else PLAIN)


class Exporter:
    """One iteration over a source, written into one memory."""

    def __init__(self, layout: Layout, plan: SegmentPlan, memory: ExportMemory) -> None:
        self._layout = layout
        self._plan = plan
        self._memory = memory
        self._checksums: list[bytes] = []
        self._hash = xxhash.xxh3_64()

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

        The chunk's room may be written again once the next but one was asked for: whoever reads longer makes the
        memory wait.

        Raises:
            LayoutInvalid: the source yields something else than it stated; the tensor is not written.
        """
        named = self._checked(tensors)
        index, tensor = -1, torch.empty(0)
        for number, chunk in enumerate(self._plan.chunks):
            start = self._memory.place(number)
            for piece in chunk.pieces:
                while index < piece.tensor:
                    index, tensor = next(named)
                self._write(piece, tensor, start + piece.segment_offset - chunk.start)
            yield self._chunk(number, chunk, start)
        next(named, None)  # one tensor more is refused, one less was

    def _checked(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
        index = -1
        for index, (name, tensor) in enumerate(tensors):
            self._check(index, name, tensor)
            yield index, tensor.detach()
        missing = [t.name for t in self._layout.tensors[index + 1 :]]
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

    def _write(self, piece: Piece, tensor: torch.Tensor, start: int) -> None:
        spec, end = self._layout.tensors[piece.tensor], start + piece.byte_count
        if piece.byte_count:
            target = torch.frombuffer(self._memory.memory[start:end], dtype=torch.uint8).view(_TORCH[spec.dtype])
            copy_elements(tensor, piece.tensor_offset // spec.dtype.item_bytes, target)
            self._hash.update(self._memory.memory[start:end])
        if piece.last:
            self._checksums.append(bytes(self._hash.digest()))
            self._hash.reset()

    def _chunk(self, number: int, chunk: ChunkRange, start: int) -> ExportedChunk:
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
        return ExportedChunk(number, start, chunk.end - chunk.start, records)


def copy_elements(tensor: torch.Tensor, first: int, target: torch.Tensor) -> None:
    """Copy `target.numel()` elements from number `first` on, in logical order, without a copy of the whole tensor."""
    count = target.numel()
    if count == tensor.numel():
        target.view(tensor.shape).copy_(tensor)
    elif tensor.is_contiguous() or tensor.dim() == 1:
        target.copy_(tensor.reshape(-1)[first : first + count])
    else:
        _copy_rows(tensor, first, target)


def _copy_rows(tensor: torch.Tensor, first: int, target: torch.Tensor) -> None:
    """The end of one row, whole rows, the beginning of another: each where there is any."""
    row, done, count = tensor[0].numel(), 0, target.numel()
    while done < count:
        number, inside = divmod(first + done, row)
        rows = (count - done) // row
        if inside == 0 and rows:
            size, source, start = rows * row, tensor[number : number + rows], 0
        else:
            size, source, start = min(row - inside, count - done), tensor[number], inside
        copy_elements(source, start, target[done : done + size])
        done += size

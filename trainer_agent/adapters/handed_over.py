"""What a trainer engine of vLLM hands over, tensor by tensor, as the source of one push."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from controlplane.core.errors import InvalidRequest, LayoutInvalid
from trainer_agent.source import LayerwiseSource, ParamMeta


class HandedOver(LayerwiseSource):
    """The source of the push: what the engine handed over, in the order in which it was stated."""

    def __init__(self, stated: LayerwiseSource) -> None:
        self.stated = stated
        self._metadata = {m.name: m for m in stated.metadata()}
        self._tensors: dict[str, torch.Tensor] = {}
        self.seen: dict[str, torch.Tensor] = {}
        """What the engine took from the watched source, and has not handed over yet."""

    def metadata(self) -> list[ParamMeta]:
        return list(self._metadata.values())

    def ties(self) -> Sequence[tuple[str, str]]:
        return self.stated.ties()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._metadata:
            yield name, self._tensors[name]

    def take(self, info: Mapping[str, Any]) -> None:
        """Raises LayoutInvalid, InvalidRequest."""
        for name, dtype, shape, tensor in self._columns(info):
            if tensor is None:
                raise LayoutInvalid(problem="no bytes came with it, nor from the watched source", names=[name])
            self._check(name, str(dtype), tuple(shape), tensor)
            self._tensors[name] = tensor
            self.seen.pop(name, None)

    def _columns(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str, Sequence[int], torch.Tensor | None]]:
        columns = [info.get(key) for key in ("names", "dtype_names", "shapes")]
        names, given = columns[0] or (), info.get("tensors")
        columns.append([self.seen.get(name) for name in names] if given is None else [keep(t) for t in given])
        if any(column is None or len(column) != len(names) for column in columns):
            problem = "names, dtype_names, shapes and tensors have to be equally long"
            raise InvalidRequest(field="update_info", problem=problem)
        return zip(*columns, strict=True)

    def _check(self, name: str, dtype: str, shape: tuple[int, ...], tensor: torch.Tensor) -> None:
        if name not in self._metadata or name in self._tensors:
            problem = "a tensor was handed over twice" if name in self._tensors else "the source states no such tensor"
            raise LayoutInvalid(problem=problem, names=[name])
        want = self._metadata[name]
        expected = (str(want.dtype).removeprefix("torch."), want.shape)
        for got in ((dtype, shape), (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))):
            if got != expected:
                raise LayoutInvalid(problem=f"the source states {expected}, and {got} was handed over", names=[name])

    def require_whole(self) -> None:
        """Raises LayoutInvalid."""
        missing = [name for name in self._metadata if name not in self._tensors]
        if missing:
            raise LayoutInvalid(problem="the update was finished without tensors that the source states", names=missing)

    def clear(self) -> None:
        self._tensors.clear()
        self.seen.clear()


class Watched(LayerwiseSource):
    """The caller's source, as an engine iterates it; what it yields is kept too."""

    def __init__(self, stated: LayerwiseSource, handed: HandedOver) -> None:
        self._stated = stated
        self._handed = handed

    def metadata(self) -> list[ParamMeta]:
        return self._stated.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._stated:
            self._handed.seen[name] = keep(tensor)
            yield name, tensor


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in this host's memory: whoever yielded it may write over it."""
    return tensor.detach().to("cpu", copy=True)

"""Where a trainer's weights come from: the port that `TrainerRank` pushes from.

`WeightSource` is what a push needs. `LayerwiseSource`, which every source of ours is, has besides all that vLLM
0.32's own `vllm.distributed.weight_transfer.base.WeightSource` has, under the same names and with the same
meanings: `metadata()` and iteration agree element for element, `held_names`, `groups` and `iter_groups` are theirs.
So vLLM's trainer engines take our sources too. Ours have additions: ties, that *every* rank which iterates yields
*every* tensor, whole, and what few sources have to say: a format other than `plain`, tensors for a draft model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from controlplane.core.errors import LayoutInvalid
from controlplane.core.layout import PLAIN, Target

if TYPE_CHECKING:
    import torch


class ParamMeta(NamedTuple):
    """One tensor as the engine's checkpoint names it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Full tensors under checkpoint names, layer by layer.

    Iteration is a collective over the trainer's ranks where it has to gather: every rank iterates to
    the end, in step, and each yields every tensor. A yielded tensor may be reused by the source as soon
    as the next one is asked for.
    """

    def metadata(self) -> Sequence[ParamMeta]:
        """The same on every rank, in the order of iteration. Shapes are declared, not read from storage."""
        ...

    def ties(self) -> Sequence[tuple[str, str]]:
        """(alias, source) pairs: `alias` is the tensor `source` under a second name; only `source` is yielded."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@runtime_checkable
class SaysFormat(Protocol):
    """A source of weights that are not plain numbers."""

    @property
    def weights_format(self) -> str:
        """`plain`, `fp8-block`, or what the engine's checkpoint names as its quantisation."""
        ...


@runtime_checkable
class SaysTargets(Protocol):
    """A source with tensors that are not for the model itself alone."""

    def targets(self) -> Mapping[str, tuple[Target, ...]]:
        """Of those tensors. What is the draft's alone is named with `controlplane.core.layout.DRAFT_PREFIX`."""
        ...


class LayerwiseSource(ABC):
    """A `WeightSource` that vLLM's trainer engines take as theirs."""

    weights_format = PLAIN

    @abstractmethod
    def metadata(self) -> list[ParamMeta]:
        """The same on every rank, in the order of iteration, without transferring anything."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass over all tensors, as `WeightSource` says."""

    def ties(self) -> Sequence[tuple[str, str]]:
        """(alias, source) pairs. None, unless a source says otherwise."""
        return ()

    def held_names(self) -> Collection[str] | None:
        """The tensors that this rank yields, or None for all of them: what our sources always answer."""
        return None

    def groups(self) -> list[list[str]]:
        """`layerwise_groups` of the metadata's names, restricted to those in which something is held here."""
        groups = layerwise_groups([m.name for m in self.metadata()])
        held = self.held_names()
        return groups if held is None else [g for g in groups if any(name in held for name in g)]

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """One pass, a group at a time: (names, tensors). A group's tensors are held in memory together.

        Raises:
            LayoutInvalid: the iteration does not follow the groups.
        """
        tensors = iter(self)
        for group in self.groups():
            found = [_expected(name, next(tensors, None)) for name in group]
            yield group, found
        for name, _ in tensors:
            raise LayoutInvalid(problem="the source yields a tensor that is in none of its groups", names=[name])


def layerwise_groups(names: Sequence[str]) -> list[list[str]]:
    """Names by decoder layer: by the outermost number in each, in rising order, one stack of layers after another.

    Names without a number come first when they stand before all layers, else last. The same partition as
    `vllm.distributed.weight_transfer.base.layerwise_groups`.
    """
    before: list[str] = []
    after: list[str] = []
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        prefix, number = _layer_of(name)
        if number is None:
            (after if stacks else before).append(name)
        else:
            stacks.setdefault(prefix, {}).setdefault(number, []).append(name)
    layers = [stack[number] for stack in stacks.values() for number in sorted(stack)]
    return [group for group in (before, *layers, after) if group]


def _layer_of(name: str) -> tuple[str, int | None]:
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:i]), int(part)
    return name, None


def _expected(name: str, got: tuple[str, torch.Tensor] | None) -> torch.Tensor:
    if got is None:
        raise LayoutInvalid(problem="the source ended without a tensor that metadata() states", names=[name])
    if got[0] != name:
        raise LayoutInvalid(problem=f"the source yields {got[0]} where its groups have", names=[name])
    return got[1]

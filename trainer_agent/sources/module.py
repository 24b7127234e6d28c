"""The parameters of any `torch.nn.Module` as a `WeightSource`: plain, in DDP, compiled, or sharded as DTensors.

Promises: names and shapes are stated once, from what parameters declare, never from how much memory they have just
now. A parameter under two names is one tensor and a tie. Sharded parameters (FSDP2's `fully_shard`, tensor parallelism
by DTensor) are gathered one at a time, whole, on every rank: then iteration is a collective over their meshes, whose
process groups' own timeouts bound it, and no deadline of ours. FSDP2's parameters are taken as they are stored, not as
they are computed with. Buffers are not weights, and are left out.

Refuses FSDP1, whose parameters are parts of flat ones. Refuses, before the first tensor is yielded, parameters that
came, went, changed shape or dtype, or whose memory was taken away (offloading) since the source was made.

transformers 5 fuses experts in memory under names that checkpoints do not have; renaming can't undo that. Such a model
goes through `IterableSource`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from controlplane.core.errors import LayoutInvalid
from trainer_agent.source import LayerwiseSource, ParamMeta
from trainer_agent.sources.storage import has_storage

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that torch.compile and activation checkpointing put in."""


class ModuleSource(LayerwiseSource):
    """Weights of a module for `TrainerRank`.

    Args:
        module: a model, or what wraps it.
        names: what the engine's checkpoint calls a parameter, given the module's name of it; None for one that is
            not sent, such as a value head's. By default the names are the module's own.

    Raises:
        LayoutInvalid: two parameters are given one name, or the module is wrapped by FSDP1.
    """

    def __init__(self, module: nn.Module, names: Callable[[str], str | None] | None = None) -> None:
        self._module = _unwrapped(module)
        self._names = names
        _refuse_flat_parameters(self._module)
        parameters, self._ties = self._parameters()
        self._metadata = [_meta(name, parameter) for name, parameter in parameters.items()]

    def metadata(self) -> list[ParamMeta]:
        return list(self._metadata)

    def ties(self) -> Sequence[tuple[str, str]]:
        return self._ties

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Raises LayoutInvalid, before anything is yielded, when the parameters are not those that were stated."""
        parameters, _ = self._parameters()
        self._check(parameters)
        for name in [m.name for m in self._metadata]:
            parameter = parameters[name]
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()

    def _parameters(self) -> tuple[dict[str, Tensor], list[tuple[str, str]]]:
        """Each tensor by the first of its names, and its further names: (alias, source)."""
        _reshard(self._module)
        first: dict[Hashable, str] = {}
        parameters: dict[str, Tensor] = {}
        ties: list[tuple[str, str]] = []
        for name, parameter in self._named():
            source = first.setdefault(_identity(parameter), name)
            if source != name:
                ties.append((name, source))
            elif parameters.setdefault(name, parameter) is not parameter:
                raise LayoutInvalid(problem="several parameters are given one name", names=[name])
        return parameters, ties

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
            renamed = self._names(bare) if self._names else bare
            if renamed is not None:
                yield renamed, parameter

    def _check(self, parameters: dict[str, Tensor]) -> None:
        stated = {m.name: m for m in self._metadata}
        changed = sorted(stated.keys() ^ parameters.keys())
        if changed:
            raise LayoutInvalid(problem="parameters came or went since the source was made", names=changed)
        changed = [name for name, parameter in parameters.items() if _meta(name, parameter) != stated[name]]
        if changed:
            raise LayoutInvalid(problem="parameters changed shape or dtype since the source was made", names=changed)
        gone = [name for name, parameter in parameters.items() if not has_storage(_local(parameter))]
        if gone:
            raise LayoutInvalid(problem="parameters are offloaded: their memory is not there", names=gone)


def _unwrapped(module: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile, in whatever order they wrap it."""
    while True:
        attribute = "module" if isinstance(module, DistributedDataParallel) else "_orig_mod"
        inner = getattr(module, attribute, None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def _refuse_flat_parameters(module: nn.Module) -> None:
    if any(isinstance(m, FullyShardedDataParallel) for m in module.modules()):
        problem = "FSDP1 holds parts of flat parameters; shard with torch.distributed.fsdp.fully_shard instead"
        raise LayoutInvalid(problem=problem, names=[type(module).__name__])


def _reshard(module: nn.Module) -> None:
    """After a forward pass, FSDP2 may still hold what it gathered, in the dtype of the computation."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _identity(parameter: Tensor) -> Hashable:
    """Equal for two parameters that are the same memory seen in the same way."""
    if isinstance(parameter, DTensor) or parameter.numel() == 0 or not has_storage(parameter):
        return id(parameter)
    memory = parameter.untyped_storage().data_ptr(), parameter.storage_offset()
    return (*memory, parameter.shape, parameter.stride(), parameter.dtype)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _meta(name: str, parameter: Tensor) -> ParamMeta:
    return ParamMeta(name, parameter.dtype, tuple(parameter.shape))

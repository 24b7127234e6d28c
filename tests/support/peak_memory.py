"""How much memory tensors take that were made meanwhile, at the worst moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages of all results, but for those that were there before: `besides`."""

    def __init__(self, besides: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = {t.untyped_storage().data_ptr() for t in besides}
        self._living: list[tuple[StorageWeakRef, int]] = []
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._living = [(ref, size) for ref, size in self._living if not ref.expired()]  # type: ignore[no-untyped-call]
        mine = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if storage.data_ptr() not in self._before and all(ref != mine for ref, _ in self._living):
            self._living.append((mine, storage.nbytes()))
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._living))

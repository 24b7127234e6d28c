"""What must not live on in a forked child: sockets, locks and mappings of the parent.

Data loaders and checkpoints fork, also in the middle of a push. A child that keeps the parent's socket hides
the parent's death from the trainer agent; one that keeps a segment's descriptor keeps its lock, and one that keeps
the mapping keeps its memory. So every holder registers here and lets go in the child, at once.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Holder(Protocol):
    """Something that holds a descriptor or a mapping of this process."""

    def abandon(self) -> None:
        """Called in a forked child: close what was inherited, touch nothing that the parent still uses."""
        ...


_holders: WeakSet[Holder] = WeakSet()


def let_go_in_children(holder: Holder) -> None:
    """Call `holder.abandon()` in every child that this process forks from now on, while `holder` lives."""
    _holders.add(holder)


def _after_fork_in_child() -> None:
    for holder in list(_holders):
        holder.abandon()
    _holders.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

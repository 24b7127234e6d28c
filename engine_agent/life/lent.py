"""An engine's devices while somebody else has them: who, on the disk too (INV-7), and when they are free again.

Promises: it is noted before an engine sleeps, and until it is awake or may be replaced; of a dead engine, nobody starts
another one before each who put it to sleep gave its devices back. Trainers do so by a wake, by telling the coordinator
that they hold none, or by the end of their lease; others by a wake alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from controlplane.core.engine_core import EngineCore
from controlplane.core.engine_events import Event, HoldChanged
from controlplane.core.engine_state import Hold, HoldKind, Life, Residency
from controlplane.core.names import TRAINERS
from controlplane.core.versions import Term
from engine_agent.life.remembered import Lent, Memory


class LentDevices:
    """Of one life of an engine."""

    def __init__(self, core: EngineCore, memory: Memory, apply: Callable[[Event], object]) -> None:
        self._core = core
        self._memory = memory
        self._apply = apply
        self.free = asyncio.Event()
        """Of a dead engine: all of them were given back."""
        self._noted = memory.lent()
        """Perhaps an earlier life's, which the disk did not let go."""
        self.device_uuids: tuple[str, ...] = () if self._noted is None else self._noted.device_uuids
        """The engine's, once it has started. Of a life that never had an engine: what an earlier one noted."""

    @property
    def taken(self) -> bool:
        """Who put this engine to sleep has its devices; only their word ends that, also when the engine died."""
        return self._core.state.residency is not Residency.AWAKE and bool(self._owners)

    @property
    def awaited(self) -> bool:
        """The engine is dead: a fresh one may take its devices only when they are given back."""
        return self._core.state.life is Life.DEAD and self.taken

    def expect(self, owner: str) -> None:
        """Before it sleeps for that one. Raises LedgerError, with nothing changed."""
        lent = self._of(tuple(sorted({*self._owners, owner})))
        if lent != self._noted:
            self._memory.note_lent(lent)
            self._noted = lent

    def note(self) -> None:
        """What became of it, after each event. It is decided, so a disk that does not take it now takes it later."""
        lent = self._of(self._owners)
        if lent != self._noted:
            self._memory.narrow_lent(lent)
            self._noted = lent

    def _of(self, owners: tuple[str, ...]) -> Lent | None:
        before = self._noted
        if before is not None and owners == before.owners:
            return before
        if not owners:
            return None
        return Lent(owners, max(0 if before is None else before.term, self._core.term), self.device_uuids)

    def sleeps_for(self, owner: str) -> bool:
        """No engine is on the devices, and none will be while this one has them: a sleep for it is done."""
        return self.awaited and (owner.startswith(TRAINERS) or owner in self._owners)

    def heard(self, holder: str, term: Term) -> None:
        """The coordinator's word, after the engine died: who has devices of the model's engines now; the model's term.

        Nobody: what trainers had they gave back, or their lease is over. Another trainer: its word is waited for.
        """
        if self.awaited and not holder and self._noted is not None and term >= self._noted.term:
            self.given_back([owner for owner in self._owners if owner.startswith(TRAINERS)])

    def given_back(self, owners: Sequence[str]) -> None:
        """By these. Changes nothing but for a dead engine: one that lives is woken."""
        if not self.awaited:
            return
        for owner in owners:
            self._apply(HoldChanged(Hold(HoldKind.ASLEEP, owner), present=False))
        if not self.taken:
            self.free.set()

    @property
    def _owners(self) -> tuple[str, ...]:
        return tuple(sorted(h.owner for h in self._core.state.holds if h.kind is HoldKind.ASLEEP))

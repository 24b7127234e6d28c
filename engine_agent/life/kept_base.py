"""The bytes of the version that an engine holds, kept by its agent, so that the next one can come as a delta.

Promises: there is a base only while the engine holds just that version. Poison, a sleep that drops the weights, a death
and another version end it; an update that came to nothing before its install leaves it. It takes host memory of one
whole copy of the weights, and of a second one while a delta is applied; hence only where the agent's settings say so.
"""

from __future__ import annotations

from controlplane.core.engine_state import EngineState, Held, KeptBase
from controlplane.core.engine_update import Update
from engine_agent.engine import StagedWeights
from engine_agent.receivers import Receiver


class BaseKeeper:
    """At most one base."""

    def __init__(self, *, wanted: bool) -> None:
        """Not `wanted`: nothing is ever kept."""
        self.wanted = wanted
        self.account: KeptBase | None = None
        """What is kept."""
        self._receiver: Receiver | None = None

    def take(self, update: Update, receiver: Receiver) -> bool:
        """Of an update that was applied just now. True: the receiver is this one's to close."""
        if not self.wanted or not receiver.keeps or update.assembly is None:
            return False
        self.close()
        assembly = update.assembly
        self.account = KeptBase(
            Held(update.version, update.content_digest),
            assembly.layout.digest,
            tuple(assembly.checksum(i) for i in range(len(assembly.layout.tensors))),
        )
        self._receiver = receiver
        return True

    def staged(self, account: KeptBase) -> StagedWeights | None:
        """The bytes of that account; None: they are gone. Valid until something else happens to the engine."""
        if self._receiver is None or self.account != account:
            return None
        return self._receiver.staged(account.weights.version.label)

    def follow(self, state: EngineState) -> None:
        """While an install is under way the old version is not claimed, and may yet be held again (INV-4)."""
        if self.account is not None and not state.installing and state.weights != self.account.weights:
            self.close()

    def close(self) -> None:
        receiver, self._receiver, self.account = self._receiver, None, None
        if receiver is not None:
            receiver.close()

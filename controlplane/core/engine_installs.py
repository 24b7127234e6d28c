"""An install at the agent's core, from its first step to its end; and what becomes known of the weights afterwards.

The version is unset before the first byte and set in the step that finished (INV-1); a failure after the first byte is
poison (INV-4), and so is whatever shows later that the weights are not what they are said to be.
"""

from __future__ import annotations

from dataclasses import replace

from controlplane.core.engine_account import EngineAccount
from controlplane.core.engine_effects import Effect, InstallDecided, Report
from controlplane.core.engine_events import (
    CanaryDeferred,
    CanaryPassed,
    Disproven,
    Doubted,
    InstallEnded,
    Proven,
    Quiesced,
    SpansDisagreed,
)
from controlplane.core.engine_state import Held, Hold, HoldKind, Poisoned, Stage, Unset, Weights
from controlplane.core.engine_update import Update


class Installs(EngineAccount):
    """One at a time, each to its end."""

    def _begin_install(self, update: Update) -> None:
        """From here on the gate is shut, and only the install's end opens it."""
        update.held_before = self.state.weights
        hold = Hold(HoldKind.UPDATING, update.update_id)
        self.state = replace(self.state, holds=self.state.holds | {hold})
        self._progress(update, Stage.INSTALLING)

    def _quiesced(self, event: Quiesced) -> list[Effect]:
        """INV-1: unset before the first byte is installed."""
        update = self._installing()
        update.quiesced = True
        update.unproven_before = {h for h in self.state.holds if h.kind is HoldKind.UNPROVEN}
        return self._become(weights=Unset())

    def _canary_passed(self, event: CanaryPassed) -> list[Effect]:
        """INV-1: set in the step that finished, to that manifest's version."""
        return self._applied(event)

    def _canary_deferred(self, event: CanaryDeferred) -> list[Effect]:
        """The same, but the gate stays shut until the canary spoke: nothing was ever served that it did not hear."""
        return self._applied(event)

    def _applied(self, event: CanaryPassed | CanaryDeferred) -> list[Effect]:
        update = self._installing()
        if not update.committed:
            raise AssertionError("INV-3: no commit frame was taken")
        if update.version.number >= self._highest_applied:  # a catch-up may bring what was applied before
            self._highest_applied = update.version.number
            self._digest_of_highest = update.content_digest
        self.number = max(self.number, update.version.number)
        self._end_install(update, Held(update.version, update.content_digest))
        self.state = replace(self.state, canary=event.canary if isinstance(event, CanaryPassed) else None)
        if isinstance(event, CanaryDeferred):
            hold = Hold(HoldKind.UNPROVEN, update.update_id)
            self.state = replace(self.state, holds=self.state.holds | {hold})
        self._progress(update, Stage.APPLIED, applied=event)
        return [self._remember(), InstallDecided(update.update_id, None), Report()]

    def _install_ended(self, event: InstallEnded) -> list[Effect]:
        """INV-4: untouched leaves the old version in force; touched is poison. There is no third way."""
        update = self._installing()
        self._end_install(update, Poisoned(str(event.error)) if event.touched else update.held_before)
        if isinstance(self.state.weights, Held):  # what is given back is as unproven as it was
            self.state = replace(self.state, holds=self.state.holds | update.unproven_before)
        self._progress(update, Stage.FAILED if event.touched else Stage.ABORTED, event.error)
        return [InstallDecided(update.update_id, event.error), Report()]

    def _end_install(self, update: Update, weights: Weights) -> None:
        self._update = None
        self._set_weights(weights)
        self.state = replace(self.state, holds=self.state.holds - {Hold(HoldKind.UPDATING, update.update_id)})

    def _spans_disagreed(self, event: SpansDisagreed) -> list[Effect]:
        self._set_weights(Poisoned(event.cause))
        if self._update is not None:  # an install that touches nothing must not bring the old claim back
            self._update.held_before = self.state.weights
        return [Report()]

    def _proven(self, event: Proven) -> list[Effect]:
        """The canary that was put off spoke: nothing but the usual shuts the gate now."""
        unproven = {h for h in self.state.holds if h.kind is HoldKind.UNPROVEN}
        self.state = replace(self.state, canary=event.canary)
        return self._become(holds=self.state.holds - unproven)

    def _disproven(self, event: Disproven) -> list[Effect]:
        """INV-4: bytes were installed, and something is wrong with them: poison, as at any install."""
        return self._become(weights=Poisoned(event.cause))

    def _doubted(self, event: Doubted) -> list[Effect]:
        """INV-4: equal engines say something else of the same bytes: what this one holds is not that version. Void for
        what it does not hold any more."""
        if self.state.applied != event.version:
            return []
        return self._spans_disagreed(SpansDisagreed(event.cause))

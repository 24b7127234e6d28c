"""Cores of engines that each break one rule."""

from __future__ import annotations

from dataclasses import replace

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.engine_core import EngineCore
from controlplane.core.engine_state import Held, HoldKind, Poisoned, Residency
from controlplane.core.versions import NO_TERM, Term


class ClaimsDuringTheInstall(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        return [] if isinstance(event, ee.Quiesced) else super().handle(event, now)


class ClaimsAtTheCommit(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        effects = super().handle(event, now)
        if isinstance(event, ee.CommitArrived):
            self.state = replace(self.state, weights=Held(event.version, event.content_digest))
        return effects


class TheEndCommits(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        update = self.update
        if isinstance(event, ee.StreamEnded) and update is not None and update.verified and not self.state.installing:
            return [fx.StartInstall(event.stream, update)]
        return super().handle(event, now)


class ResumesAfterAFailure(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ee.InstallEnded):
            event = replace(event, touched=False)
        return super().handle(event, now)


class ForgetsPoison(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        before = self.state
        effects = super().handle(event, now)
        if isinstance(self.state.weights, Poisoned) and isinstance(event, ee.SpansDisagreed):
            self.state = before
        return effects


class GoesBack(EngineCore):
    def _check_version(self, event: ee.Opened) -> None:
        pass


class AnswersDone(EngineCore):
    def _is_done_or_under_way(self, event: ee.Opened) -> bool:
        progress = self.state.progress
        return progress is not None and (progress.update_id, progress.version) == (event.update_id, event.version)


class ForgetsTerms(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        self.term = Term(0)
        return super().handle(event, now)


class NeedsNoWelcome(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        self.welcomed = True
        return super().handle(event, now)


class FollowsOldCoordinators(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ee.FleetChanged):
            self.coordinator_term = Term(0)
        return super().handle(event, now)


class IgnoresHolds(EngineCore):
    @property
    def gate_open(self) -> bool:
        return isinstance(self.state.weights, Held) and self.state.weights.version in self.served


class ClaimsAfterADeepSleep(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        weights = self.state.weights
        effects = super().handle(event, now)
        if isinstance(event, ee.SleepRequested):
            self.state = replace(self.state, weights=weights)
        return effects


class TakesUpdatesWhileAsleep(EngineCore):
    def _check_able(self, event: ee.Opened) -> None:
        state = self.state
        self.state = replace(state, residency=Residency.AWAKE)
        try:
            super()._check_able(event)
        finally:
            self.state = state


class TakesUpdatesWhileDraining(EngineCore):
    def _check_able(self, event: ee.Opened) -> None:
        state = self.state
        self.state = replace(state, holds=frozenset(h for h in state.holds if h.kind is not HoldKind.DRAINING))
        try:
            super()._check_able(event)
        finally:
            self.state = state


class FrozenTakesUpdates(EngineCore):
    def _check_able(self, event: ee.Opened) -> None:
        pass


class WakesForAnybody(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ee.WakeRequested):
            holds = frozenset(h for h in self.state.holds if h.kind is not HoldKind.ASLEEP)
            self.state = replace(self.state, holds=holds)
        return super().handle(event, now)


class IsAwakeThoughASleepFollowed(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        self._power._outdated = 0
        return super().handle(event, now)


class HeedsDeadLives(EngineCore):
    def heed(self, event: ee.SleepRequested | ee.WakeRequested) -> None:
        pass


class SleepsNoMore(EngineCore):
    """The devices stay taken, whatever it says."""

    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        return [x for x in super().handle(event, now) if not isinstance(x, fx.StartSleep)]


class ObeysOldCoordinators(EngineCore):
    def _fence(self, writer_term: Term, *, by_coordinator: bool) -> e.StaleTerm | None:
        return None if by_coordinator else super()._fence(writer_term, by_coordinator=by_coordinator)


class TakesAnyModel(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ee.Opened):
            event = replace(event, model=self.state.model)
        return super().handle(event, now)


class TheEndOfAStreamIsItsCommit(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        update = self.update
        over = isinstance(event, ee.StreamEnded) and update is not None and update.stream == event.stream
        if over and update is not None and update.streaming and update.verified and update.in_stream:
            update.committed = True
            return [fx.FinishStreaming(update.stream, update)]
        return super().handle(event, now)


class StreamsItselfToItsEnd(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        effects = super().handle(event, now)
        update = self.update
        if isinstance(event, ee.BytesVerified) and update is not None and update.streaming:
            update.committed = True
            effects.append(fx.FinishStreaming(update.stream, update))
        return effects


class LeavesAStreamToAFencedWriter(EngineCore):
    def _see_terms(self, term: Term = NO_TERM, coordinator_term: Term = NO_TERM) -> list[fx.Effect]:
        update = self.update
        if update is None or not (update.streaming and self.state.installing):
            return super()._see_terms(term, coordinator_term)
        self.term, self.coordinator_term = max(self.term, term), max(self.coordinator_term, coordinator_term)
        return [self._remember()]

    def _fence(self, writer_term: Term, *, by_coordinator: bool) -> e.StaleTerm | None:
        streams = self.update is not None and self.update.streaming and self.state.installing
        return None if streams else super()._fence(writer_term, by_coordinator=by_coordinator)


class ACutStreamCostsNothing(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        update = self.update
        if isinstance(event, ee.InstallEnded) and update is not None and update.cut:
            event = replace(event, touched=False)
        return super().handle(event, now)


class NeverCutsAStream(EngineCore):
    """What ends without a commit frame waits for one for ever."""

    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        return [x for x in super().handle(event, now) if not isinstance(x, fx.CutStreaming)]


class HeedsNoDoubt(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        return [] if isinstance(event, ee.Doubted) else super().handle(event, now)

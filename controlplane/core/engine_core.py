"""The engine agent's decisions: who may write, what a stream's frames mean, what the engine claims.

`EngineCore.handle(event, now)` takes what happened and returns what to do; it does no I/O and knows no clock. A refusal
is a typed error, raised with the state untouched. The agent carries events in and effects out, in order.

The life of an update here: Opened → (LayoutArrived) → ChunkArrived* → BytesVerified → CommitArrived → Quiesced →
Installed → CanaryPassed. Up to CommitArrived an end of the stream is an abort and costs nothing (INV-3, INV-4);
from CommitArrived on the agent owns the install and the stream may come and go (INV-6). A streaming update is installed
as it comes: see `engine_streaming`.

What is judged at open is in `engine_admission`, an install in `engine_installs`; both stand on `engine_account`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from controlplane.core import engine_admission, engine_sleep, engine_transitions
from controlplane.core import errors as e
from controlplane.core.conditions import dated, engine_conditions, rests_on
from controlplane.core.engine_admission import Admission
from controlplane.core.engine_effects import (
    DropStaged,
    Effect,
    EndStream,
    FinishStreaming,
    InstallDecided,
    Report,
    SendReady,
    StartInstall,
    Verify,
)
from controlplane.core.engine_events import (
    BytesVerified,
    CanaryDeferred,
    CanaryPassed,
    ChunkArrived,
    CommitArrived,
    Died,
    Disproven,
    Doubted,
    Event,
    FleetChanged,
    HoldChanged,
    InstallEnded,
    LayoutArrived,
    Opened,
    Proven,
    Quiesced,
    RequestsCounted,
    SleepRequested,
    SpansDisagreed,
    Started,
    Stopping,
    StreamAdmitted,
    StreamEnded,
    WakeRequested,
    Woke,
)
from controlplane.core.engine_state import (
    EngineState,
    Held,
    HoldKind,
    Life,
    Refusal,
    Stage,
    Unset,
)
from controlplane.core.engine_streaming import Streaming, cut
from controlplane.core.versions import FROZEN

SLEEP, DELTA = engine_sleep.SLEEP, engine_admission.DELTA
"""Capabilities that decide what is refused."""
DROPS_WEIGHTS = engine_sleep.DROPS_WEIGHTS


class EngineCore(Admission, Streaming):
    """The decisions for one incarnation of one engine."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Decide. Raises a `Refused` with the state untouched. `now` is the caller's monotonic time, seconds."""
        before = self.state
        try:
            effects = _HANDLERS[type(event)](self, event)
        except e.Refused as error:
            if isinstance(event, Opened):
                self.refused = Refusal(event.version, error.reason, str(error), now)
            raise
        engine_transitions.check(type(event), before, self.state)
        self._note_refusal(before, now)
        self._look(now)
        return effects

    def _look(self, now: float) -> None:
        """Conditions anew, if they may have changed: many thousand chunks of an update change none."""
        rest = rests_on(self.state, self.served)
        if rest != self._conditions_rest_on:
            self._conditions_rest_on = rest
            self.conditions = dated(engine_conditions(self.state, self.served), self.conditions, now)

    def _note_refusal(self, before: EngineState, now: float) -> None:
        """An update that ended badly, for people."""
        progress = self.state.progress
        if progress is not None and progress is not before.progress and progress.stage in (Stage.ABORTED, Stage.FAILED):
            self.refused = Refusal(progress.version, progress.error_reason, progress.error_message, now)

    # ---- life ----

    def _started(self, event: Started) -> list[Effect]:
        self.expected, self.capabilities = event.expected, event.capabilities
        if event.initial_digest is None:
            return self._become(life=Life.RUNNING)
        # INV-1: not a label found in an engine, but bytes that the agent read and summed itself.
        self.state = replace(self.state, frozen=True)
        return self._become(life=Life.RUNNING, weights=Held(FROZEN, event.initial_digest))

    def _died(self, event: Died) -> list[Effect]:
        """The weights went with the process: this incarnation holds nothing and never will again."""
        update, self._update = self._update, None
        effects = self._become(life=Life.DEAD, weights=Unset())
        if update is None:
            return effects
        error = e.EngineDied(engine_id=self.state.engine_id, cause=event.cause)
        installing = self.state.installing
        self._progress(update, Stage.FAILED if installing else Stage.ABORTED, error)
        ended: list[Effect] = [InstallDecided(update.update_id, error)] if installing else []
        return [*effects, *ended, *([EndStream(update.stream, error)] if update.in_stream else [])]

    def _stopping(self, event: Stopping) -> list[Effect]:
        return self._become(life=Life.STOPPING)

    def _fleet_changed(self, event: FleetChanged) -> list[Effect]:
        if event.coordinator_term < self.coordinator_term:
            raise e.StaleTerm(model="(coordinator)", got=event.coordinator_term, current=self.coordinator_term)
        self.welcomed = True
        self.served = event.served
        self.commits.note(event.commits)
        return [*self._see_terms(event.term, event.coordinator_term), Report()]

    # ---- a stream, up to its commit ----

    def _chunk_arrived(self, event: ChunkArrived) -> list[Effect]:
        update = self._receiving(event.stream)
        self._check_frame_version(update, event.version)
        if update.assembly is None:
            raise e.FrameOutOfOrder(expected="the layout", got=f"chunk {event.index}")
        if update.streaming:
            return self._streamed_chunk_arrived(update, update.assembly, event)
        if self.state.progress is not None and self.state.progress.stage is Stage.READY:
            raise e.FrameOutOfOrder(expected="commit", got=f"chunk {event.index}")
        completed = update.assembly.add(event.index, event.records, event.buffer_bytes, last=event.last)
        self._progress(update, Stage.RECEIVING)
        return [Verify(event.stream, tuple(completed), update.assembly.complete)]

    def _bytes_verified(self, event: BytesVerified) -> list[Effect]:
        update = self._receiving(event.stream)
        if update.assembly is None or not update.assembly.complete:
            raise e.FrameOutOfOrder(expected="every tensor", got="a part of them")
        update.verified = True
        update.content_digest = update.assembly.digest()
        if update.streaming:  # ready was before the first byte; what is missing is the commit frame
            return []
        self._progress(update, Stage.READY)
        return [SendReady(event.stream), Report()]

    def _commit_arrived(self, event: CommitArrived) -> list[Effect]:
        """INV-3: only this, and only if it states what really came."""
        update = self._receiving(event.stream)
        self._check_frame_version(update, event.version)
        if update.assembly is None or not update.verified:
            raise e.FrameOutOfOrder(expected="all chunks", got="commit")
        if event.chunk_count != update.assembly.chunk_count:
            raise e.ByteCountMismatch(what="chunks", expected=event.chunk_count, got=update.assembly.chunk_count)
        if event.byte_count != update.assembly.byte_count:
            raise e.ByteCountMismatch(what="bytes", expected=event.byte_count, got=update.assembly.byte_count)
        if event.content_digest != update.content_digest:
            raise e.ChecksumMismatch(
                name="content", expected=event.content_digest.hex(), got=update.content_digest.hex()
            )
        if update.version.number == self._highest_applied and update.content_digest != self._digest_of_highest:
            raise e.VersionConflict(
                version=str(update.version), expected=self._digest_of_highest.hex(), got=update.content_digest.hex()
            )
        fence = self._fence(update.writer_term, by_coordinator=update.by_coordinator)
        if fence is not None:  # judged once more at the start of an install (INV-7)
            raise fence
        update.committed = True
        if update.streaming:
            return [FinishStreaming(event.stream, update)]
        self._begin_install(update)
        return [*self._see_number(update.version.number), Report(), StartInstall(event.stream, update)]

    def _stream_ended(self, event: StreamEnded) -> list[Effect]:
        """INV-3: an end is never a commit. INV-4: before the first byte is installed it costs nothing."""
        update = self._update
        if update is None or update.stream != event.stream or not update.in_stream:
            return []
        if self.state.installing:
            return cut(update, e.UpdateAborted(update_id=update.update_id, cause=event.cause))
        self._update = None
        self._progress(update, Stage.ABORTED, reason=event.reason, message=event.cause)
        return [DropStaged(event.stream), Report()]

    # ---- holds and counts ----

    def _hold_changed(self, event: HoldChanged) -> list[Effect]:
        effects: list[Effect] = []
        if event.present and event.hold.kind is HoldKind.DRAINING:
            draining = e.EngineDraining(engine_id=self.state.engine_id, owner=event.hold.owner)
            effects = self._abort_unless_installing(draining)
        holds = self.state.holds | {event.hold} if event.present else self.state.holds - {event.hold}
        return [*effects, *self._become(holds=holds)]

    def _abort_unless_installing(self, error: e.WeightplaneError) -> list[Effect]:
        update = self._update
        return [] if update is None or self.state.installing else self._abort(update, error)

    # ---- sleep ----

    def heed(self, event: SleepRequested | WakeRequested) -> None:
        """Also of a life that is dead, whose devices are still somebody's. Raises StaleTerm, StaleTurn (INV-7)."""
        self._power.heed(self.state, self.term, event)

    def _sleep_requested(self, event: SleepRequested) -> list[Effect]:
        """What it takes away is not claimed any more before it goes (INV-1); an install is never cut."""
        self.heed(event)
        engine_sleep.check_sleep(self.state, self.capabilities, event)
        aborted = self._abort_unless_installing(
            e.EngineAsleep(engine_id=self.state.engine_id, missing="weights and KV cache are")
        )
        if event.level == DROPS_WEIGHTS:
            self._set_weights(Unset())
        self.state, effects = self._power.sleep(self.state, event)
        return [*aborted, *effects]

    def _wake_requested(self, event: WakeRequested) -> list[Effect]:
        self.heed(event)
        self.state, effects = self._power.wake(self.state, event)
        return effects

    def _woke(self, event: Woke) -> list[Effect]:
        self.state, effects = self._power.woke(self.state, event)
        return effects

    def _requests_counted(self, event: RequestsCounted) -> list[Effect]:
        self.state = replace(
            self.state,
            live_requests=event.live,
            waiting_requests=event.waiting,
            tokens_by_lag=event.tokens_by_lag,
        )
        return []


_HANDLERS: Mapping[type, Callable[[EngineCore, Any], list[Effect]]] = {
    Started: EngineCore._started,
    Died: EngineCore._died,
    FleetChanged: EngineCore._fleet_changed,
    Opened: EngineCore._opened,
    LayoutArrived: EngineCore._layout_arrived,
    StreamAdmitted: EngineCore._stream_admitted,
    ChunkArrived: EngineCore._chunk_arrived,
    BytesVerified: EngineCore._bytes_verified,
    CommitArrived: EngineCore._commit_arrived,
    StreamEnded: EngineCore._stream_ended,
    Quiesced: EngineCore._quiesced,
    CanaryPassed: EngineCore._canary_passed,
    CanaryDeferred: EngineCore._canary_deferred,
    Proven: EngineCore._proven,
    Disproven: EngineCore._disproven,
    InstallEnded: EngineCore._install_ended,
    SpansDisagreed: EngineCore._spans_disagreed,
    Doubted: EngineCore._doubted,
    HoldChanged: EngineCore._hold_changed,
    SleepRequested: EngineCore._sleep_requested,
    WakeRequested: EngineCore._wake_requested,
    Woke: EngineCore._woke,
    RequestsCounted: EngineCore._requests_counted,
    Stopping: EngineCore._stopping,
}

"""The engine agent's decisions: who may write, what a stream's frames mean, what the engine claims.

`EngineCore.handle(event, now)` takes what happened and returns what to do; it does no I/O and knows no clock. A refusal
is a typed error, raised with the state untouched. The agent carries events in and effects out, in order.

The life of an update here: Opened → (LayoutArrived) → ChunkArrived* → BytesVerified → CommitArrived → Quiesced →
Installed → CanaryPassed. Up to CommitArrived an end of the stream is an abort and costs nothing (INV-3, INV-4);
from CommitArrived on the agent owns the install and the stream may come and go (INV-6). A streaming update is installed
as it comes: see `engine_streaming`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from controlplane.core import engine_sleep, engine_streaming, engine_transitions
from controlplane.core import errors as e
from controlplane.core.assembly import Assembly
from controlplane.core.conditions import Condition, dated, engine_conditions
from controlplane.core.engine_events import (
    Accept,
    BytesVerified,
    CanaryDeferred,
    CanaryPassed,
    ChunkArrived,
    CommitArrived,
    Died,
    Disproven,
    Doubted,
    DropStaged,
    Effect,
    EndStream,
    Event,
    FinishStreaming,
    FleetChanged,
    HoldChanged,
    InstallDecided,
    InstallEnded,
    LayoutArrived,
    Opened,
    Proven,
    Quiesced,
    Remember,
    Report,
    RequestsCounted,
    SendReady,
    SleepRequested,
    SpansDisagreed,
    Started,
    StartInstall,
    Stopping,
    StreamAdmitted,
    StreamEnded,
    Update,
    Verify,
    WakeRequested,
    Woke,
)
from controlplane.core.engine_state import (
    EngineState,
    Held,
    Hold,
    HoldKind,
    Life,
    Poisoned,
    Progress,
    Refusal,
    Stage,
    Unset,
    Weights,
)
from controlplane.core.lag import Commits
from controlplane.core.layout import Expected, Layout
from controlplane.core.versions import FROZEN, NO_TERM, Term, WeightVersion

SLEEP, DELTA = engine_sleep.SLEEP, "delta"
"""Capabilities that decide what is refused."""
DROPS_WEIGHTS = engine_sleep.DROPS_WEIGHTS
MAX_LAYOUTS = 8
"""Layouts remembered by digest; a run has one a model, or two while it changes."""


class EngineCore:
    """The decisions for one incarnation of one engine."""

    def __init__(self, state: EngineState, *, term: Term, coordinator_term: Term, number: int) -> None:
        """`term`, `coordinator_term` and `number` are the highest that the agent's disk remembers (INV-7)."""
        self.state = state
        self.served: frozenset[WeightVersion] = frozenset()
        self.commits = Commits()
        """Of the model's fleet, as far as this life was told: what a pin's lag is counted in."""
        self.term = term
        self.coordinator_term = coordinator_term
        self.number = number
        self.welcomed = False
        self.expected: Expected | None = None
        self.capabilities: frozenset[str] = frozenset()
        self.refused: Refusal | None = None
        """The latest version that this incarnation would not take, or could not."""
        self.conditions: tuple[Condition, ...] = ()
        self._layouts: dict[bytes, Layout] = {}
        self._update: Update | None = None
        self._power = engine_sleep.Power()
        self._highest_applied = -1
        self._digest_of_highest = b""

    @property
    def gate_open(self) -> bool:
        return self.state.gate_open(self.served)

    @property
    def update(self) -> Update | None:
        return self._update

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
        self.conditions = dated(engine_conditions(self.state, self.served), self.conditions, now)
        return effects

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

    def _see_terms(self, term: Term = NO_TERM, coordinator_term: Term = NO_TERM) -> list[Effect]:
        """INV-7: a higher term ends the update of a lower one's writer, unless its commit was taken."""
        effects: list[Effect] = []
        if term > self.term or coordinator_term > self.coordinator_term:
            self.term = max(self.term, term)
            self.coordinator_term = max(self.coordinator_term, coordinator_term)
            effects.append(self._remember())
        update = self._update
        if update is not None and update.in_stream:
            fence = self._fence(update.writer_term, by_coordinator=update.by_coordinator)
            effects += [] if fence is None else self._abort(update, fence)
        return effects

    def _fence(self, writer_term: Term, *, by_coordinator: bool) -> e.StaleTerm | None:
        """INV-7: a writer below the highest term that this agent ever saw; trainers and coordinators apart."""
        name, current = ("(coordinator)", self.coordinator_term) if by_coordinator else (self.state.model, self.term)
        return e.StaleTerm(model=name, got=writer_term, current=current) if writer_term < current else None

    # ---- a stream, up to its commit ----

    def _opened(self, event: Opened) -> list[Effect]:
        self._check_identity(event)
        fence = self._fence(event.writer_term, by_coordinator=event.by_coordinator)
        if fence is not None:
            raise fence
        if self._is_done_or_under_way(event):
            return [*self._see_writer(event), Accept(event.stream, layout_needed=False, attached=True)]
        self._check_able(event)
        self._check_version(event)
        self._check_base(event)
        engine_streaming.check_open(self, event)
        self._check_room(event)
        update = Update(
            stream=event.stream,
            update_id=event.update_id,
            version=event.version,
            writer_term=event.writer_term,
            byte_count=event.byte_count,
            layout_digest=event.layout_digest,
            by_coordinator=event.by_coordinator,
            base=None if event.base is None else event.kept,
            streaming=event.streaming,
            reference=event.reference,
            pause=event.pause,
        )
        layout = self._layouts.get(event.layout_digest)
        if layout is not None:
            self._check_layout(update, layout)
        effects = self._see_writer(event)
        if self._update is not None:
            same = self._update.update_id == update.update_id
            cause = "the same update was opened again" if same else f"version {update.version} comes instead"
            effects += self._abort(self._update, e.UpdateAborted(update_id=self._update.update_id, cause=cause))
        self._update = update
        self._progress(update, Stage.RECEIVING)
        return [*effects, Accept(event.stream, layout_needed=layout is None, attached=False), Report()]

    def _see_writer(self, event: Opened) -> list[Effect]:
        if event.by_coordinator:
            return self._see_terms(coordinator_term=event.writer_term)
        return self._see_terms(term=event.writer_term)

    def _check_identity(self, event: Opened) -> None:
        s = self.state
        if not self.welcomed:
            raise e.NotWelcomed(engine_id=s.engine_id)
        if event.run_id != s.run_id:
            raise e.WrongRun(expected=s.run_id, got=event.run_id)
        if event.model != s.model:
            raise e.WrongModel(expected=s.model, got=event.model)
        if event.engine_id not in (None, s.engine_id):
            raise e.UnknownEngine(engine_id=f"{event.engine_id} (this is {s.engine_id})")
        if event.incarnation != s.incarnation:
            raise e.WrongIncarnation(engine_id=s.engine_id, expected=s.incarnation, got=event.incarnation)
        if s.life is not Life.RUNNING:
            raise e.EngineNotReady(engine_id=s.engine_id, holds=s.life.value)

    def _is_done_or_under_way(self, event: Opened) -> bool:
        """INV-6: the same attempt again, past its commit: its install runs, or the engine holds it *now*."""
        progress = self.state.progress
        if progress is None or (progress.update_id, progress.version) != (event.update_id, event.version):
            return False
        under_way = progress.stage is Stage.INSTALLING and self._update is not None and self._update.committed
        return under_way or (progress.stage is Stage.APPLIED and self.state.applied == event.version)

    def _check_room(self, event: Opened) -> None:
        """One update at a time. The same attempt again, before its commit, starts anew at chunk 0; a higher term
        ends a lower one's update."""
        update = self._update
        if update is None:
            return
        same = (update.update_id, update.version) == (event.update_id, event.version)
        alike = update.by_coordinator == event.by_coordinator
        fenced = alike and update.writer_term < event.writer_term
        # A catch-up yields to a newer version: what it brings is about to be old.
        yields = update.by_coordinator and event.version.number > update.version.number
        if self.state.installing or not (same or fenced or yields):
            raise e.UpdateInProgress(update_id=update.update_id, version=str(update.version))

    def _check_able(self, event: Opened) -> None:
        """The engine takes updates at all, and has its weights' memory (P2)."""
        s = self.state
        if s.frozen:
            raise e.ModelFrozen(model=s.model, problem=f"{s.engine_id} takes no update")
        draining = s.held_by(HoldKind.DRAINING)
        if draining is not None:
            raise e.EngineDraining(engine_id=s.engine_id, owner=draining)
        engine_sleep.check_resident(s, by_coordinator=event.by_coordinator)

    def _check_base(self, event: Opened) -> None:
        """INV-5: a delta is for exactly the weights that are held now."""
        s = self.state
        if event.base is None:
            return
        if isinstance(s.weights, Poisoned):
            raise e.EnginePoisoned(engine_id=s.engine_id, cause=s.weights.cause)
        if s.weights != event.base:
            raise e.BaseMismatch(engine_id=s.engine_id, expected=_named(event.base), got=_named(s.weights))
        if DELTA not in self.capabilities:
            raise e.UnsupportedByEngine(engine_id=s.engine_id, what="updates that are deltas")
        kept = event.kept
        if kept is None or (kept.weights, kept.layout_digest) != (event.base, event.layout_digest):
            got = f"{_named(s.weights)}, and has no bytes of it under that layout"
            raise e.BaseMismatch(engine_id=s.engine_id, expected=_named(event.base), got=got)

    def _check_version(self, event: Opened) -> None:
        """INV-5: never below what was applied in this incarnation, and not what is held already. While it is unset a
        coordinator may bring any version that the fleet serves."""
        applied = self.state.applied
        if event.by_coordinator and applied is None and event.version in self.served:
            return
        if event.version.number < self._highest_applied or applied == event.version:
            raise e.StaleVersion(
                engine_id=self.state.engine_id, applied=self._highest_applied, got=event.version.number
            )

    def _layout_arrived(self, event: LayoutArrived) -> list[Effect]:
        update = self._receiving(event.stream)
        if update.assembly is not None:
            raise e.FrameOutOfOrder(expected="a chunk", got="a layout")
        self._check_layout(update, event.layout)
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.pop(next(iter(self._layouts)))
        self._layouts[event.layout.digest] = event.layout
        return []

    def _check_layout(self, update: Update, layout: Layout) -> None:
        if layout.digest != update.layout_digest:
            raise e.LayoutUnknown(digest=update.layout_digest.hex())
        if layout.byte_count != update.byte_count:
            raise e.ByteCountMismatch(what="manifest", expected=layout.byte_count, got=update.byte_count)
        if self.expected is not None:
            self.expected.check(layout)
        update.assembly = Assembly(layout, None if update.base is None else update.base.checksums)

    def _chunk_arrived(self, event: ChunkArrived) -> list[Effect]:
        update = self._receiving(event.stream)
        self._check_frame_version(update, event.version)
        if update.assembly is None:
            raise e.FrameOutOfOrder(expected="the layout", got=f"chunk {event.index}")
        if update.streaming:
            return engine_streaming.chunk_arrived(self, update, update.assembly, event)
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
        return [Report(), StartInstall(event.stream, update)]

    def _begin_install(self, update: Update) -> None:
        """From here on the gate is shut, and only the install's end opens it."""
        update.held_before = self.state.weights
        hold = Hold(HoldKind.UPDATING, update.update_id)
        self.state = replace(self.state, holds=self.state.holds | {hold})
        self._progress(update, Stage.INSTALLING)

    def _stream_ended(self, event: StreamEnded) -> list[Effect]:
        """INV-3: an end is never a commit. INV-4: before the first byte is installed it costs nothing."""
        update = self._update
        if update is None or update.stream != event.stream or not update.in_stream:
            return []
        if self.state.installing:
            return engine_streaming.cut(update, e.UpdateAborted(update_id=update.update_id, cause=event.cause))
        self._update = None
        self._progress(update, Stage.ABORTED, reason=event.reason, message=event.cause)
        return [DropStaged(event.stream), Report()]

    def _receiving(self, stream: int) -> Update:
        update = self._update
        if update is None or update.stream != stream or not update.in_stream:
            progress = self.state.progress
            cause = progress.error_message if progress is not None and progress.error_message else "it ended"
            raise e.UpdateAborted(update_id=progress.update_id if progress else "", cause=cause)
        return update

    def _check_frame_version(self, update: Update, version: WeightVersion) -> None:
        if version != update.version:
            raise e.FrameOutOfOrder(expected=f"version {update.version}", got=f"version {version}")

    def _abort(self, update: Update, error: e.WeightplaneError) -> list[Effect]:
        if self.state.installing:
            return [EndStream(update.stream, error), *engine_streaming.cut(update, error)]
        self._update = None
        self._progress(update, Stage.ABORTED, error)
        return [EndStream(update.stream, error), DropStaged(update.stream), Report()]

    # ---- an install ----

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

    def _installing(self) -> Update:
        if self._update is None or not self.state.installing:
            raise AssertionError("no install is under way")
        return self._update

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

    def _sleep_requested(self, event: SleepRequested) -> list[Effect]:
        """What it takes away is not claimed any more before it goes (INV-1); an install is never cut."""
        engine_sleep.check_sleep(self.state, self.capabilities, event)
        aborted = self._abort_unless_installing(
            e.EngineAsleep(engine_id=self.state.engine_id, missing="weights and KV cache are")
        )
        if event.level == DROPS_WEIGHTS:
            self._set_weights(Unset())
        self.state, effects = self._power.sleep(self.state, event)
        return [*aborted, *effects]

    def _wake_requested(self, event: WakeRequested) -> list[Effect]:
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

    # ---- helpers ----

    def _become(
        self,
        life: Life | None = None,
        weights: Weights | None = None,
        holds: frozenset[Hold] | None = None,
    ) -> list[Effect]:
        if weights is not None:
            self._set_weights(weights)
        self.state = replace(
            self.state,
            life=self.state.life if life is None else life,
            holds=self.state.holds if holds is None else holds,
        )
        return [Report()]

    def _set_weights(self, weights: Weights) -> None:
        """Poison comes with its hold, and goes with it; what was unproven is gone."""
        poison = Hold(HoldKind.POISONED, self.state.engine_id)
        others = frozenset(h for h in self.state.holds if h.kind is not HoldKind.UNPROVEN)
        holds = others | {poison} if isinstance(weights, Poisoned) else others - {poison}
        canary = self.state.canary if weights == self.state.weights else None
        self.state = replace(self.state, weights=weights, holds=holds, canary=canary)

    def _progress(
        self,
        update: Update,
        stage: Stage,
        error: e.WeightplaneError | None = None,
        *,
        reason: str = "",
        message: str = "",
        applied: CanaryPassed | CanaryDeferred | None = None,
    ) -> None:
        self.state = replace(
            self.state,
            progress=Progress(
                update_id=update.update_id,
                version=update.version,
                stage=stage,
                bytes_received=update.assembly.byte_count if update.assembly else 0,
                error_reason=error.reason if error else reason,
                error_message=str(error) if error else message,
                timings=None if applied is None else applied.timings,
                changed_tensors=None if applied is None else applied.changed_tensors,
                tensor_count=len(update.assembly.layout.tensors) if applied is not None and update.assembly else 0,
            ),
        )

    def _remember(self) -> Remember:
        return Remember(self.term, self.coordinator_term, self.number)


def _named(weights: Weights) -> str:
    """Version and content, for a message."""
    return f"{weights.version} ({weights.content_digest.hex()[:12]})" if isinstance(weights, Held) else "nothing"


_HANDLERS: Mapping[type, Callable[[EngineCore, Any], list[Effect]]] = {
    Started: EngineCore._started,
    Died: EngineCore._died,
    FleetChanged: EngineCore._fleet_changed,
    Opened: EngineCore._opened,
    LayoutArrived: EngineCore._layout_arrived,
    StreamAdmitted: engine_streaming.admitted,
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

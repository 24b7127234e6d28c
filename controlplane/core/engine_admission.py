"""Which updates an engine takes: what is judged at open and at the layout, and what ends an update before its commit.

A refusal leaves everything as it was (INV-4); a writer of a higher term ends a lower one's update (INV-7).
"""

from __future__ import annotations

from controlplane.core import engine_sleep
from controlplane.core import errors as e
from controlplane.core.assembly import Assembly
from controlplane.core.engine_account import EngineAccount
from controlplane.core.engine_effects import Accept, DropStaged, Effect, EndStream, Report
from controlplane.core.engine_events import LayoutArrived, Opened
from controlplane.core.engine_state import Held, HoldKind, Life, Poisoned, Stage, Weights
from controlplane.core.engine_streaming import STREAMING, cut
from controlplane.core.engine_update import Update
from controlplane.core.layout import Layout
from controlplane.core.versions import NO_TERM, Term

DELTA = "delta"
"""Capability: updates that carry only what changed."""
MAX_LAYOUTS = 8
"""Layouts remembered by digest; a run has one a model, or two while it changes."""


class Admission(EngineAccount):
    """Refusals are typed errors, raised with the state untouched."""

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
        self._check_streaming(event)
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

    def _check_streaming(self, event: Opened) -> None:
        """An engine may install whole versions only; and a delta is never streamed."""
        if not event.streaming:
            return
        if STREAMING not in self.capabilities:
            what = "updates installed as they come (streaming)"
            raise e.UnsupportedByEngine(engine_id=self.state.engine_id, what=what)
        if event.base is not None:
            what = "deltas installed as they come (streaming)"
            raise e.UnsupportedByEngine(engine_id=self.state.engine_id, what=what)

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
        assert self.expected is not None  # it said so when it started, and only a running engine is opened to
        self.expected.check(layout)
        update.assembly = Assembly(layout, None if update.base is None else update.base.checksums)

    def _abort(self, update: Update, error: e.WeightplaneError) -> list[Effect]:
        if self.state.installing:
            return [EndStream(update.stream, error), *cut(update, error)]
        self._update = None
        self._progress(update, Stage.ABORTED, error)
        return [EndStream(update.stream, error), DropStaged(update.stream), Report()]


def _named(weights: Weights) -> str:
    """Version and content, for a message."""
    return f"{weights.version} ({weights.content_digest.hex()[:12]})" if isinstance(weights, Held) else "nothing"

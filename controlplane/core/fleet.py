"""The coordinator's decisions: sessions, leases, plans, updates, what is served, who is routable.

`FleetCore.handle(event, now)` takes what happened and returns what to do, in order; records to be written come before
anything that tells of them. It does no I/O, and knows no clock and no randomness: ids come in with the events.

The state is a `Book`; each kind of decision has a module: `fleet_engines`, `fleet_leases`, `fleet_begins`,
`fleet_updates`, `fleet_catch_up`, `fleet_keeps`, `fleet_recovery`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from controlplane.core import (
    fleet_begins,
    fleet_catch_up,
    fleet_engines,
    fleet_keeps,
    fleet_leases,
    fleet_recovery,
    fleet_updates,
)
from controlplane.core.fleet_book import Book, FleetSettings
from controlplane.core.fleet_effects import (
    BroadcastState,
    Effect,
    Save,
    ViewChanged,
)
from controlplane.core.fleet_events import (
    AbortRequested,
    CarryEnded,
    CheckpointPublished,
    CheckpointRetired,
    EngineConnected,
    EngineReported,
    Event,
    KeepRequested,
    LedgerAccepted,
    Paused,
    ReleaseRequested,
    RollbackRequested,
    SessionEnded,
    Tick,
    TrainerConnected,
    TrainerReported,
    UpdateRequested,
)
from controlplane.core.fleet_records import Recovered

__all__ = ["FleetCore", "FleetSettings"]


class FleetCore(Book):
    """The decisions of one coordinator's life."""

    def __init__(self, settings: FleetSettings, recovered: Recovered, now: float) -> None:
        super().__init__(settings, recovered, now)
        fleet_recovery.restore(self, recovered, now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Decide. Raises a `Refused` with nothing changed. `now`: monotonic seconds."""
        effects = _HANDLERS[type(event)](self, event, now)
        if effects and self.must_tell():
            effects.append(BroadcastState())
        # INV-9: what is told is read from this state, so all of its records are written first.
        return sorted(effects, key=lambda effect: not isinstance(effect, Save))


def _session_ended(book: Book, event: SessionEnded, now: float) -> list[Effect]:
    trainer = next((t for t in book.trainers.values() if t.session == event.session), None)
    if trainer is not None:
        return fleet_leases.ended(trainer, now, goodbye=event.goodbye)
    record = book.of_session(event.session)
    return [] if record is None else fleet_engines.ended(book, record, now, goodbye=event.goodbye)


def _paused(book: Book, event: Paused, now: float) -> list[Effect]:
    """Every limit that ran meanwhile gets the time back: what came is still unread, what was due was not done."""
    book.recovery_ends_at += event.seconds
    for engine in book.engines.values():
        engine.reported_at += event.seconds
    for trainer in book.trainers.values():
        trainer.expires_at += event.seconds
        trainer.progressed_at += event.seconds
    for update in book.updates.values():
        update.deadline += event.seconds
        update.awaits_until += event.seconds
    return []


def _tick(book: Book, event: Tick, now: float) -> list[Effect]:
    effects: list[Effect] = [ViewChanged()]  # also heartbeats that changed nothing make what is known younger
    if book.awaited and now >= book.recovery_ends_at:
        book.awaited.clear()
    effects += fleet_engines.silence_the_stopped(book, now)
    fleet_leases.presume_devices_free(book, now)
    for update in book.updates.values():
        if not update.phase.final:
            fleet_updates.lose_the_silent(book, update, now)
    for model in list(book.models):
        effects += fleet_updates.advance(book, model, now)
        effects += fleet_catch_up.catch_up(book, model, now)
    return effects


_HANDLERS: Mapping[type, Callable[[Book, Any, float], list[Effect]]] = {
    EngineConnected: fleet_engines.connected,
    EngineReported: fleet_engines.reported,
    TrainerConnected: fleet_leases.connected,
    TrainerReported: fleet_leases.reported,
    SessionEnded: _session_ended,
    UpdateRequested: fleet_begins.requested,
    RollbackRequested: fleet_begins.rollback,
    AbortRequested: fleet_updates.abort,
    CheckpointPublished: fleet_catch_up.published,
    CheckpointRetired: fleet_catch_up.retired,
    KeepRequested: fleet_keeps.keep,
    ReleaseRequested: fleet_keeps.release,
    CarryEnded: fleet_catch_up.ended,
    LedgerAccepted: fleet_recovery.accepted,
    Paused: _paused,
    Tick: _tick,
}

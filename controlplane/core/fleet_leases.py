"""Trainers' leases: who may write a model, under which term (INV-7).

A lease is renewed only while the trainer's step or phase moves. Expiry alone fences nobody; it permits a takeover.
"""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.core import errors as e
from controlplane.core.fleet_book import Book
from controlplane.core.fleet_effects import (
    BroadcastState,
    CloseSession,
    Effect,
    Save,
    ViewChanged,
    Welcome,
)
from controlplane.core.fleet_events import TrainerConnected, TrainerReported
from controlplane.core.fleet_records import EngineRecord, LostRank, ModelRecord, TermGiven, TrainerRecord
from controlplane.core.fleet_recovery import check_trainer
from controlplane.core.fleet_updates import finish
from controlplane.core.planner import devices_of, misfit
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import Term


def connected(book: Book, event: TrainerConnected, now: float) -> list[Effect]:
    """A hello asks for the lease, or resumes it."""
    book.check_run(event.run_id)
    model = book.model(event.model)
    if model.frozen:
        raise e.ModelFrozen(model=event.model, problem=f"{event.trainer_id} cannot train it")
    regressed = check_trainer(book, event)
    if regressed is not None:
        return [CloseSession(event.session, regressed), ViewChanged()]
    holder = book.trainers.get(event.model)
    if holder is not None and event.held_term == holder.term and event.incarnation == holder.incarnation:
        return _resume(book, holder, event, now)
    if event.held_term:
        raise e.StaleTerm(model=event.model, got=event.held_term, current=model.term)
    for _, error in _misfits(book, event):
        raise error
    _check_takeover(holder, event, now)
    book.check_recovered()  # INV-7: an engine that was not heard yet may know that this term was given before
    return _give(book, model, holder, event, now)


def _misfits(book: Book, event: TrainerConnected) -> Iterator[tuple[EngineRecord, e.EngineMisfit]]:
    """Connected engines that these ranks could not feed (G4)."""
    held = devices_of(event.ranks)
    for record in book.of_model(event.model):
        error = misfit(record.place, held)
        if record.session is not None and error is not None:
            yield record, error


def _resume(book: Book, holder: TrainerRecord, event: TrainerConnected, now: float) -> list[Effect]:
    """The same life on a new connection, which is no progress. An engine that came meanwhile and does not fit is sent
    away."""
    if holder.ranks != event.ranks:
        book.plan_revision += 1
    holder.session, holder.ranks, holder.left = event.session, event.ranks, False
    holder.transports, holder.load, holder.software = event.transports, event.load, event.software
    _renew_while_it_moves(book, holder, now)
    effects: list[Effect] = [Welcome(event.session, holder.term), ViewChanged()]
    for record, error in _misfits(book, event):
        assert record.session is not None, "connected"
        effects.append(CloseSession(record.session, error))
        book.silence(record)
    return effects


def _check_takeover(holder: TrainerRecord | None, event: TrainerConnected, now: float) -> None:
    if holder is None or event.takeover or now >= holder.expires_at:
        return
    same_agent = holder.trainer_id == event.trainer_id and holder.incarnation == event.ended_incarnation
    if not same_agent:
        raise e.LeaseHeld(
            model=event.model,
            holder=holder.trainer_id,
            incarnation=holder.incarnation,
            term=holder.term,
            remaining_seconds=round(holder.expires_at - now, 1),
        )


def _give(
    book: Book, model: ModelRecord, holder: TrainerRecord | None, event: TrainerConnected, now: float
) -> list[Effect]:
    """A new term: in the ledger first; the older holder is fenced, its update ends unless it went go."""
    model.term = Term(model.term + 1)
    effects: list[Effect] = [
        Save(TermGiven(event.model, model.term, event.trainer_id, event.incarnation)),
        Welcome(event.session, model.term),  # its first frame: states are broadcast below
    ]
    if holder is not None and holder.session is not None:
        error = e.StaleTerm(model=event.model, got=holder.term, current=model.term)
        effects.append(CloseSession(holder.session, error))
    book.trainers[event.model] = TrainerRecord(
        event.trainer_id,
        event.incarnation,
        event.model,
        model.term,
        event.ranks,
        event.session,
        expires_at=now + book.settings.lease_ttl_seconds,
        progressed_at=now,
        devices_unknown=True,
        transports=event.transports,
        load=event.load,
        software=event.software,
    )
    book.plan_revision += 1
    update = book.open_update(event.model)
    if update is not None and update.phase is Phase.PREPARING:
        effects += finish(book, update, Phase.FAILED, f"fenced by term {model.term}", now)
    book.revision += 1
    return [*effects, BroadcastState(), ViewChanged()]


def reported(book: Book, event: TrainerReported, now: float) -> list[Effect]:
    """A status: what renews the lease is that step or phase moved."""
    holder = next((t for t in book.trainers.values() if t.session == event.session), None)
    if holder is None:
        return []
    if event.progress > holder.progress:
        holder.progress, holder.progressed_at = event.progress, now
    _renew_while_it_moves(book, holder, now)
    before, said = _shown(holder), _shown(event)
    holder.step, holder.phase, holder.holds_devices, holder.lost = said
    holder.devices_unknown = False
    return [ViewChanged()] if before != said else []


def _shown(of: TrainerRecord | TrainerReported) -> tuple[int | None, str, bool, tuple[LostRank, ...]]:
    return of.step, of.phase, of.holds_devices, of.lost


def presume_devices_free(book: Book, now: float) -> None:
    """It said nothing for the lease's whole time, since a restart or since its session ended: engines may be started
    on its devices, and a checkpoint may heal them."""
    for holder in book.trainers.values():
        if now >= holder.expires_at:
            holder.devices_unknown = False
            holder.holds_devices &= holder.session is not None


def _renew_while_it_moves(book: Book, holder: TrainerRecord, now: float) -> None:
    if now - holder.progressed_at <= book.settings.step_limit_seconds:
        holder.expires_at = now + book.settings.lease_ttl_seconds


def ended(holder: TrainerRecord, now: float, *, goodbye: bool) -> list[Effect]:
    """Its session is over; the lease stands until its time."""
    holder.session = None
    if goodbye:
        holder.left = True
        holder.expires_at = now  # it left on purpose: nobody need wait for its lease
        holder.holds_devices = False
    return [ViewChanged()]

"""After a restart: what is waited for, and a ledger that turns out to be an older copy (LEDGER_REGRESSED).

Agents remember the highest terms and numbers that they saw. If any is above the ledger's, giving out the next one
could give it twice; so nothing is given until the newer ledger is put back, or a person accepts this one.
"""

from __future__ import annotations

from controlplane.core import errors as e
from controlplane.core.fleet_begins import restored
from controlplane.core.fleet_book import Book
from controlplane.core.fleet_effects import (
    BroadcastState,
    CloseSession,
    Effect,
    Save,
    ViewChanged,
)
from controlplane.core.fleet_events import EngineConnected, LedgerAccepted, TrainerConnected
from controlplane.core.fleet_records import FloorRaised, Recovered, TermGiven, TrainerRecord
from controlplane.core.versions import NO_TERM, Term


def restore(book: Book, recovered: Recovered, now: float) -> None:
    """Leases get their whole time again, and their holders may resume them; open updates are decided."""
    for lease in recovered.leases:
        book.trainers[lease.model] = _resumable(book, lease, now)
    for began, went_go in recovered.open_updates:
        rolled = began.update_id in recovered.rolled
        update = restored(book, began, now, went_go=went_go, rolled=rolled)
        book.updates[update.update_id] = update


def _resumable(book: Book, lease: TermGiven, now: float) -> TrainerRecord:
    return TrainerRecord(
        lease.trainer_id,
        lease.incarnation,
        lease.model,
        lease.term,
        (),
        None,
        expires_at=now + book.settings.lease_ttl_seconds,
        progressed_at=now,
        devices_unknown=True,
    )


def note_engine(book: Book, event: EngineConnected) -> e.StaleTerm | None:
    """Compare what its disk remembers with the ledger. Returns the refusal of one that obeys a later coordinator."""
    state = event.state
    who, last = state.engine_id, book.next_number - 1
    book.seen.note(event.max_number, event.max_coordinator_term, state.model, event.max_term)
    if event.max_coordinator_term > book.term:
        book.above[who] = _regressed("coordinator term", book.term, event.max_coordinator_term, who)
        return e.StaleTerm(model="(coordinator)", got=book.term, current=event.max_coordinator_term)
    term = book.model(state.model).term
    if event.max_number > last:
        book.above[who] = _regressed("number", last, event.max_number, who)
    elif event.max_term > term:
        book.above[who] = _regressed(f"term of {state.model}", term, event.max_term, who)
    return None


def check_trainer(book: Book, event: TrainerConnected) -> e.LedgerRegressed | None:
    """No lease is given or resumed while the ledger may be an older copy: its term could be given twice."""
    term = book.model(event.model).term
    if event.held_term > term:
        book.seen.note(0, NO_TERM, event.model, event.held_term)
        book.above[event.trainer_id] = _regressed(f"term of {event.model}", term, event.held_term, event.trainer_id)
    return next(iter(book.above.values()), None)


def accepted(book: Book, event: LedgerAccepted, now: float) -> list[Effect]:
    """Nothing up to what was ever seen is given again. Everybody comes anew, under this coordinator's new term."""
    book.check_run(event.run_id)
    if not book.above:
        return []
    number = max(book.seen.number, book.next_number - 1)
    # Above every term that was seen: whoever holds a lost one is fenced, by a term that nobody has.
    seen = {name: term for name, term in book.seen.terms.items() if term > book.model(name).term}
    terms = {name: Term(seen[name] + 1) if name in seen else model.term for name, model in book.models.items()}
    book.term = Term(max(book.seen.coordinator_term, book.term) + 1)
    book.next_number = number + 1
    for name, term in terms.items():
        if term > book.model(name).term:
            book.model(name).term = term
            book.trainers.pop(name, None)  # whoever held what this ledger knew was followed by others
    book.above.clear()
    floor = FloorRaised(number, book.term, tuple(sorted(terms.items())), event.accepted_by)
    error = e.PeerLost(peer="the coordinator", cause="its ledger was accepted; come again")
    sessions = [r.session for r in book.engines.values()] + [t.session for t in book.trainers.values()]
    book.revision += 1
    closed = [CloseSession(s, error) for s in sessions if s is not None]
    return [Save(floor), *closed, BroadcastState(), ViewChanged()]


def _regressed(what: str, known: int, seen: int, who: str) -> e.LedgerRegressed:
    return e.LedgerRegressed(what=what, known=known, seen=seen, who=who)

"""How an update goes on: abort, go, decide (INV-9)."""

from __future__ import annotations

from controlplane.core import errors as e
from controlplane.core.fleet_book import Book
from controlplane.core.fleet_doubts import judge_all
from controlplane.core.fleet_effects import (
    BroadcastState,
    Effect,
    Save,
    UpdateChanged,
    ViewChanged,
)
from controlplane.core.fleet_events import AbortRequested
from controlplane.core.fleet_records import ModelRecord, UpdateDecided, UpdateRolled, UpdateWentGo
from controlplane.core.lag import FleetCommit
from controlplane.core.plan import Apply
from controlplane.core.update_transaction import Phase, UpdateTransaction
from controlplane.core.versions import ModelName, WeightVersion

PATIENCE_AFTER_WAITING = 8
"""Further decisions that one may miss which was waited for in vain."""


def _limit_after_go(book: Book, update: UpdateTransaction) -> float:
    """Bytes of a streaming engine go only now."""
    streams = any(a.apply is Apply.STREAMING for a in update.plan.assignments)
    return book.settings.go_limit_seconds + (book.settings.ready_limit_seconds if streams else 0.0)


def advance(book: Book, model: ModelName, now: float) -> list[Effect]:
    """Go and decide, as far as what is known allows."""
    effects: list[Effect] = []
    update = book.open_update(model)
    while update is not None and not update.phase.final:
        if update.may_roll:
            effects += _roll(book, update)
        step = _next_phase(book, update, now)
        if step is None:
            break
        phase, cause = step
        doubts = judge_all(book, model, now) if phase.final else []
        if doubts:  # who was waited for is gone, and those who are left contradict somebody
            effects += doubts
        elif phase is Phase.GO:
            update.phase, update.deadline = Phase.GO, now + _limit_after_go(book, update)
            update.times.went_go = now
            effects += [Save(UpdateWentGo(update.update_id)), UpdateChanged(update.update_id), ViewChanged()]
        else:
            effects += finish(book, update, phase, cause, now)
    if update is not None and not effects:
        effects.append(UpdateChanged(update.update_id))
    return effects


def _next_phase(book: Book, update: UpdateTransaction, now: float) -> tuple[Phase, str] | None:
    """INV-9: a decision rests on engines that are alive at it; ticks may be late, after a pause of this process."""

    def step() -> tuple[Phase, str] | None:
        return update.next_phase(now, served_has_holder=lambda: book.served_has_holder(update.model))

    found = step()
    return step() if found is not None and lose_the_silent(book, update, now) else found


def lose_the_silent(book: Book, update: UpdateTransaction, now: float) -> bool:
    """Whether that changed an outcome."""
    ttl = book.settings.lease_ttl_seconds
    changed = False
    for outcome in list(update.outcomes.values()):
        record = book.engines.get(outcome.engine_id)
        heard_at = record.reported_at if record is not None else book.recovery_ends_at - ttl
        if now - heard_at > ttl:
            changed |= update.lose(outcome.engine_id, "silent for longer than the lease's time")
    return changed


def _roll(book: Book, update: UpdateTransaction) -> list[Effect]:
    """Serve the new version beside the old one, from its first unit on: in the ledger before anyone is told."""
    model = book.model(update.model)
    update.rolled = True
    model.served = (*model.served[-1:], update.version)
    _count_commit(model, update)
    _note_digest(book, update)
    rolled = UpdateRolled(update.update_id, update.model, model.served, model.ordinal, update.content_digest)
    return [Save(rolled), BroadcastState(), UpdateChanged(update.update_id), ViewChanged()]


def finish(book: Book, update: UpdateTransaction, phase: Phase, cause: str, now: float) -> list[Effect]:
    """Decide: in the ledger before anyone is told (INV-9)."""
    model = book.model(update.model)
    update.phase, update.cause, update.times.decided = phase, cause, now
    if update.committed:
        model.served = _served_after(book, update)
        if not update.rolled:
            _count_commit(model, update)
        _note_digest(book, update)
        _count_the_late(book, update)
    decided = UpdateDecided(
        update.update_id,
        update.model,
        phase,
        cause,
        model.served,
        model.ordinal,
        update.content_digest,
        tuple(update.outcomes.values()),
    )
    return [Save(decided), BroadcastState(), UpdateChanged(update.update_id), ViewChanged()]


def _count_commit(model: ModelRecord, update: UpdateTransaction) -> None:
    model.ordinal += 1
    model.commits.note([FleetCommit(update.version, model.ordinal)])


def _served_after(book: Book, update: UpdateTransaction) -> tuple[WeightVersion, ...]:
    """The new version alone; but while nobody alive holds it any more, what was served beside it too."""
    held = any(r.session is not None and r.state.applied == update.version for r in book.of_model(update.model))
    return (update.version,) if held or not update.rolled else book.model(update.model).served


def _note_digest(book: Book, update: UpdateTransaction) -> None:
    model = book.model(update.model)
    digests = {**model.digests, update.version: update.content_digest}
    model.digests = {v: digests[v] for v in model.served if digests.get(v)}
    book.revision += 1


def _count_the_late(book: Book, update: UpdateTransaction) -> None:
    """Who was able to take it and was too slow, or came too late to be asked. Who failed is another matter."""
    for record in book.of_model(update.model):
        outcome = update.outcomes.get(record.place.engine_id)
        late = outcome is None or not outcome.ended
        if record.able and late and book.kept_at(record) is None:
            waited = outcome is not None and outcome.awaited
            record.missed = -PATIENCE_AFTER_WAITING if waited else record.missed + 1


def abort(book: Book, event: AbortRequested, now: float) -> list[Effect]:
    """Given up by its trainer. Costs nothing before go; after it the engines' reports decide."""
    book.check_run(event.run_id)
    update = book.updates.get(event.update_id)
    if update is None:
        raise e.UnknownUpdate(update_id=event.update_id)
    book.check_term(update.model, event.term)
    if update.phase is Phase.GO:
        raise e.FrameOutOfOrder(expected="a decision from the engines' reports", got="abort after go")
    if update.phase.final:
        return []
    return finish(book, update, Phase.FAILED, event.reason or "given up by the trainer", now)

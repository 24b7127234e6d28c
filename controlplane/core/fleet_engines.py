"""Engines as they say they are: hellos, reports, silence, goodbyes (INV-8)."""

from __future__ import annotations

from controlplane.core import errors as e
from controlplane.core.engine_state import EngineState, Held
from controlplane.core.fleet_book import Book
from controlplane.core.fleet_catch_up import catch_up, forget_carry
from controlplane.core.fleet_doubts import judge_all, to_be_judged
from controlplane.core.fleet_effects import (
    BroadcastState,
    CloseSession,
    Effect,
    Save,
    ViewChanged,
    Welcome,
)
from controlplane.core.fleet_events import EngineConnected, EngineReported
from controlplane.core.fleet_records import EngineForgotten, EngineKnown, EngineRecord, FrozenServed
from controlplane.core.fleet_recovery import note_engine
from controlplane.core.fleet_updates import advance
from controlplane.core.planner import check_fit
from controlplane.core.versions import FROZEN, NO_TERM


def connected(book: Book, event: EngineConnected, now: float) -> list[Effect]:
    """A hello. The latest life of an engine is the one that counts."""
    book.check_run(event.state.run_id)
    _check_order(book, event)
    trainer = book.trainers.get(event.state.model)
    if trainer is not None and (trainer.session is not None or now < trainer.expires_at):  # it may come back
        check_fit(event.place, trainer.ranks)
    _check_frozen(book, event.state)
    fenced = note_engine(book, event)
    if fenced is not None:  # the engine obeys a later coordinator than this one
        return [CloseSession(event.session, fenced), ViewChanged()]
    frozen = _serve_frozen(book, event.state)
    engine_id = event.place.engine_id
    old = book.engines.get(engine_id)
    effects: list[Effect] = []
    if old is None:
        effects.append(Save(EngineKnown(engine_id, event.state.model)))
    elif old.session is not None:
        effects.append(CloseSession(old.session, _why_replaced(old.state, event.state)))
    if old is not None and old.state.incarnation != event.state.incarnation:
        forget_carry(book, engine_id)
    if old is None or old.place != event.place:
        book.plan_revision += 1
    record = EngineRecord(
        event.place, event.state, event.session, now, event.capabilities, event.gate_open, event.refused
    )
    book.put(record, event.session)
    book.awaited.discard(engine_id)
    return [*effects, *frozen, Welcome(event.session, NO_TERM), *_after_report(book, record, None, now)]


def _check_order(book: Book, event: EngineConnected) -> None:
    """L2: the hello of an earlier life, held up on its way, must not take the place of the one that lives."""
    old = book.engines.get(event.place.engine_id)
    if old is not None and 0 < event.place.incarnation_number < old.place.incarnation_number:
        raise e.WrongIncarnation(
            engine_id=event.place.engine_id, expected=old.state.incarnation, got=event.state.incarnation
        )


def _check_frozen(book: Book, state: EngineState) -> None:
    """A model is trained, or served as it was loaded: never both. Its engines loaded the same."""
    model = book.model(state.model)
    if state.frozen and (model.term or (model.served and not model.frozen)):
        problem = f"for {state.engine_id}, but a trainer was given term {model.term}"
        raise e.ModelFrozen(model=state.model, problem=problem)
    if model.frozen and not state.frozen:
        raise e.ModelFrozen(model=state.model, problem=f"nobody would bring {state.engine_id} any weights")
    if model.frozen and isinstance(state.weights, Held):
        expected, got = model.digests[FROZEN], state.weights.content_digest
        if expected != got:
            raise e.VersionConflict(version=str(FROZEN), expected=expected.hex(), got=got.hex())


def _serve_frozen(book: Book, state: EngineState) -> list[Effect]:
    """The first engine of a frozen model says what its content is."""
    model = book.model(state.model)
    if model.frozen or not state.frozen or not isinstance(state.weights, Held):
        return []
    model.served, model.digests = (FROZEN,), {FROZEN: state.weights.content_digest}
    book.revision += 1
    return [Save(FrozenServed(state.model, state.weights.content_digest)), BroadcastState()]


def _why_replaced(old: EngineState, new: EngineState) -> e.WeightplaneError:
    """L2: another life took its place, which the old one must hear. The same life on a new connection loses nothing
    but the old connection."""
    if old.incarnation == new.incarnation:
        return e.PeerLost(peer=old.engine_id, cause="the same life opened a newer session")
    return e.WrongIncarnation(engine_id=old.engine_id, expected=new.incarnation, got=old.incarnation)


def reported(book: Book, event: EngineReported, now: float) -> list[Effect]:
    """A status: the newest stands for all before it."""
    record = book.of_session(event.session)
    if record is None:
        return []
    _check_same(book, record.state, event.state)
    before = record.state
    same = (before, record.gate_open) == (event.state, event.gate_open)
    record.state, record.gate_open, record.reported_at = event.state, event.gate_open, now
    record.refused = event.refused or record.refused
    return [] if same else _after_report(book, record, before, now)


def _check_same(book: Book, known: EngineState, said: EngineState) -> None:
    """A session is one life of one engine's: nobody's word counts for another's (L2, L7)."""
    book.check_run(said.run_id)
    if said.engine_id != known.engine_id:
        raise e.UnknownEngine(engine_id=f"{said.engine_id} (in the session of {known.engine_id})")
    if said.model != known.model:
        raise e.WrongModel(expected=known.model, got=said.model)
    if said.incarnation != known.incarnation:
        raise e.WrongIncarnation(engine_id=known.engine_id, expected=known.incarnation, got=said.incarnation)


def _after_report(book: Book, record: EngineRecord, before: EngineState | None, now: float) -> list[Effect]:
    """`before`: what it reported last, in this session."""
    if book.holds_wanted(record):
        record.missed = 0
    model = record.state.model
    for update in book.updates.values():  # of other models too: perhaps its earlier life served one
        if not update.phase.final:
            update.note(record.state, now)
    # Before anything is decided by what was applied.
    doubts = judge_all(book, model, now) if to_be_judged(book, record, before) else []
    return [ViewChanged(), *doubts, *advance(book, model, now), *catch_up(book, model, now, [record])]


def ended(book: Book, record: EngineRecord, now: float, *, goodbye: bool) -> list[Effect]:
    """Its session is over. A goodbye is the end of that engine; else it is UNKNOWN."""
    engine_id = record.place.engine_id
    book.silence(record)
    effects: list[Effect] = [ViewChanged()]
    if goodbye:
        book.forget(engine_id)
        book.plan_revision += 1
        forget_carry(book, engine_id)
        effects.append(Save(EngineForgotten(engine_id)))
        for update in book.updates.values():
            if not update.phase.final:
                update.lose(engine_id, "it left")
    return [*effects, *advance(book, record.state.model, now)]


def silence_the_stopped(book: Book, now: float) -> list[Effect]:
    """A session that is open and says nothing is silence too."""
    effects: list[Effect] = []
    for record in book.engines.values():
        if record.session is not None and now - record.reported_at > book.settings.lease_ttl_seconds:
            stopped = e.PeerLost(peer=record.place.engine_id, cause="no report within the lease's time")
            effects.append(CloseSession(record.session, stopped))
            book.silence(record)
    return effects

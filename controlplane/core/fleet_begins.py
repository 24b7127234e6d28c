"""How an update begins: by a trainer, as a rollback, again after a restart. Who must take part is fixed then (INV-9).

A request that comes again is answered with what it was answered before (INV-6).
"""

from __future__ import annotations

from dataclasses import replace

from controlplane.core import errors as e
from controlplane.core.fleet_book import Book
from controlplane.core.fleet_effects import (
    Carry,
    Effect,
    Save,
    StartCarry,
    UpdateChanged,
    UpdatePlanned,
    ViewChanged,
)
from controlplane.core.fleet_events import RollbackRequested, UpdateRequested
from controlplane.core.fleet_plans import Asked, check_formats, plan_of, policy_of, taking_part
from controlplane.core.fleet_records import EngineAsked, RequestKnown, UpdateBegan
from controlplane.core.plan import Plan
from controlplane.core.planner import checkpoint_plan
from controlplane.core.update_outcomes import Outcome
from controlplane.core.update_transaction import Phase, UpdateTransaction
from controlplane.core.versions import EngineId, ModelName, Term, WeightVersion

MISSES_BEFORE_AWAITED = 2
"""Decisions that a live engine may be too late for before go waits for it: else steps faster than its way to the
newest version would keep it out for ever."""


def requested(book: Book, event: UpdateRequested, now: float) -> list[Effect]:
    """A trainer asks for a number and a plan."""
    book.check_run(event.run_id)
    book.check_term(event.model, event.term)
    book.check_recovered()
    repeated = _repeated(book, event.request_id, event.model, event.layout_digest)
    if repeated is not None:
        return [UpdatePlanned(repeated)]
    _check_alone(book, event.model)
    trainer = book.trainers[event.model]
    policy = policy_of(book, event.model)
    live, required = taking_part(book, event.model, policy, trainer.ranks)
    check_formats([r for r in live if r.place.engine_id in required], trainer.load)
    avoid = {(a.engine_id, a.incarnation, a.transport): a.cause for a in event.avoid}
    plan = plan_of(book, trainer, live, required, Asked(avoid, event.base))
    trainer.avoid = avoid
    limit = event.ready_limit_seconds or book.settings.ready_limit_seconds
    update = UpdateTransaction(
        update_id=event.update_id,
        request_id=event.request_id,
        model=event.model,
        version=WeightVersion(book.next_number, event.term),
        term=event.term,
        step=event.step,
        plan=plan,
        deadline=now + min(limit, book.settings.ready_limit_seconds),
        awaits_until=now + book.settings.await_limit_seconds,
        policy=policy,
        layout_digest=event.layout_digest,
        byte_count=event.byte_count,
        outcomes=_outcomes(book, plan),
    )
    return _begin(book, update, now)


def rollback(book: Book, event: RollbackRequested, now: float) -> list[Effect]:
    """INV-5: a new, higher number that names what it restores; the coordinator brings it from a checkpoint."""
    book.check_run(event.run_id)
    book.check_recovered()
    model = book.model(event.model)
    checkpoint = model.checkpoints.get(event.number)
    if checkpoint is None:
        raise e.CheckpointUnknown(model=event.model, number=event.number)
    repeated = _repeated(book, event.request_id, event.model, checkpoint.layout_digest)
    if repeated is not None:
        return [UpdatePlanned(repeated)]
    _check_alone(book, event.model)
    policy = policy_of(book, event.model)
    live, required = taking_part(book, event.model, policy, None)
    plan = checkpoint_plan(book.plan_revision, [r.place for r in live], required)
    update = UpdateTransaction(
        update_id=event.update_id,
        request_id=event.request_id,
        model=event.model,
        version=WeightVersion(book.next_number, model.term),
        term=model.term,
        step=None,
        plan=plan,
        deadline=now + book.settings.ready_limit_seconds,
        policy=policy,
        layout_digest=checkpoint.layout_digest,
        byte_count=checkpoint.byte_count,
        restores=checkpoint.version,
        outcomes=_outcomes(book, plan),
    )
    effects = _begin(book, update, now)
    for assignment in plan.assignments:
        carry = Carry(update.update_id, assignment.engine, update.version, checkpoint, waits_for_go=True)
        book.carries[assignment.engine.engine_id] = carry
        effects.append(StartCarry(carry))
    return effects


def _repeated(book: Book, request_id: str, model: ModelName, layout_digest: bytes) -> UpdateTransaction | None:
    """The update that this request was answered with. None: it is new."""
    request = book.requests.get(request_id)
    if request is None:
        return None
    known = request.known
    for field, expected, got in (
        ("model", known.model, model),
        ("layout", known.layout_digest.hex(), layout_digest.hex()),
    ):
        if expected != got:
            raise e.RequestConflict(request_id=request_id, field=field, expected=expected, got=got)
    update = book.updates.get(known.update_id)
    if update is None:
        raise e.RequestRepeated(request_id=request_id, update_id=known.update_id, version=str(known.version))
    return update


def _check_alone(book: Book, model: ModelName) -> None:
    current = book.open_update(model)
    if current is not None:
        raise e.UpdateInProgress(update_id=current.update_id, version=str(current.version))


def _outcomes(book: Book, plan: Plan) -> dict[EngineId, Outcome]:
    return {
        a.engine.engine_id: Outcome(
            a.engine.engine_id,
            a.engine.incarnation,
            a.required,
            group=a.engine.group,
            unit=a.engine.unit,
            awaited=not a.required and book.engines[a.engine.engine_id].missed >= MISSES_BEFORE_AWAITED,
        )
        for a in plan.assignments
    }


def _begin(book: Book, update: UpdateTransaction, now: float) -> list[Effect]:
    """Uses the number up: in the ledger before it is told."""
    book.next_number += 1
    update.times.began = now
    book.keep(update)
    known = RequestKnown(
        update.request_id, update.update_id, update.model, update.version, update.layout_digest, age_seconds=0.0
    )
    book.keep_request(known, now)
    began = UpdateBegan(
        update.update_id,
        update.request_id,
        update.model,
        update.version,
        update.step,
        tuple(EngineAsked(o.engine_id, o.incarnation, o.required, o.group, o.unit) for o in update.outcomes.values()),
        update.layout_digest,
        update.byte_count,
        update.restores,
    )
    return [Save(began), UpdatePlanned(update), UpdateChanged(update.update_id), ViewChanged()]


def restored(book: Book, began: UpdateBegan, now: float, *, went_go: bool, rolled: bool) -> UpdateTransaction:
    """After a restart. Without go in the ledger it is aborted at the first tick; with go it is decided from reports."""
    policy, groups = book.settings.policy, {a.group for a in began.engines}
    return UpdateTransaction(
        update_id=began.update_id,
        request_id=began.request_id,
        model=began.model,
        version=began.version,
        term=Term(began.version.term),
        step=began.step,
        plan=Plan(0, ()),
        deadline=now + book.settings.go_limit_seconds if went_go else now,
        policy=replace(policy, min_engines={g: n for g, n in policy.min_engines.items() if g in groups}),
        phase=Phase.GO if went_go else Phase.PREPARING,
        doomed=not went_go,
        rolled=rolled,
        layout_digest=began.layout_digest,
        byte_count=began.byte_count,
        restores=began.restores,
        content_digest=book.model(began.model).digests.get(began.version, b""),
        outcomes={
            a.engine_id: Outcome(a.engine_id, a.incarnation, a.required, group=a.group, unit=a.unit)
            for a in began.engines
        },
    )

"""Catch-up and healing: engines that hold nothing that the fleet serves are brought to it from a checkpoint.

By the coordinator, under its own term, also where the served version is of an older trainer's (INV-7). Never while an
update is open, never on devices that a trainer holds; and without a checkpoint the next push does it. An engine that
stays at a version is brought to that one instead, also beside an update, which it takes no part in.
"""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.core import errors as e
from controlplane.core.engine_state import Activity
from controlplane.core.fleet_book import Book, CarryTries
from controlplane.core.fleet_effects import (
    Carry,
    Effect,
    Save,
    StartCarry,
    ViewChanged,
)
from controlplane.core.fleet_events import CarryEnded, CheckpointPublished, CheckpointRetired
from controlplane.core.fleet_records import CheckpointGone, CheckpointKept, EngineKept, EngineRecord, ModelRecord
from controlplane.core.fleet_updates import advance
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId, ModelName, UpdateId, WeightVersion

CHECKPOINT = "checkpoint"
"""Capability of an engine whose agent reads checkpoints by itself."""
MAX_CHECKPOINTS = 16
"""Of one model, known at once; the oldest that are not served are forgotten first."""
RETRY_SECONDS = (1.0, 60.0)
"""First and longest pause before an engine is tried again; doubled in between."""


def catch_up(book: Book, model: ModelName, now: float, among: Sequence[EngineRecord] | None = None) -> list[Effect]:
    """Start what can be started now. `among`: the engines that changed; None: whoever needs it."""
    sources = {} if book.open_update(model) is not None else _sources(book.model(model))
    if book.recovering or not (sources or book.kept):
        return []
    effects: list[Effect] = []
    found = book.of_model(model) if among is None else among
    for record in sorted(found, key=lambda r: r.place.engine_id):
        if len(book.carries) >= book.settings.max_carries:
            break
        kept = book.kept_at(record)
        theirs = sources if kept is None else _kept_source(book, kept)
        version = max(theirs, default=None)
        if version is not None and _needs_it(book, record, version, now):
            effects.append(StartCarry(_carry(book, record, version, theirs[version])))
    return [*effects, ViewChanged()] if effects else []


def _kept_source(book: Book, kept: EngineKept) -> dict[WeightVersion, CheckpointKept]:
    checkpoint = book.model(kept.model).checkpoints.get(kept.version.number)
    return {} if checkpoint is None else {kept.version: checkpoint}


def _sources(model: ModelRecord) -> dict[WeightVersion, CheckpointKept]:
    """Where each served version lies: what a rollback brought back lies where it lay before."""
    found: dict[WeightVersion, CheckpointKept] = {}
    for version in model.served if model.checkpoints else ():
        digest = model.digests.get(version)
        same = (c for c in model.checkpoints.values() if digest and c.content_digest == digest)
        kept = model.checkpoints.get(version.number) or next(same, None)
        if kept is not None:
            found[version] = kept
    return found


def _needs_it(book: Book, record: EngineRecord, version: WeightVersion, now: float) -> bool:
    """It could take updates, holds not what it is to hold, nothing is on its way, and INV-5 lets it be given this."""
    engine_id, applied = record.place.engine_id, record.state.applied
    tries = book.carry_tries.get(engine_id)
    return (
        record.able
        and CHECKPOINT in record.capabilities
        and not book.lent(record)
        and not book.holds_wanted(record)
        and (applied is None or applied.number < version.number)
        and record.state.activity is Activity.IDLE
        and engine_id not in book.carries
        and (tries is None or now >= tries.retry_at)
    )


def _carry(book: Book, record: EngineRecord, version: WeightVersion, checkpoint: CheckpointKept) -> Carry:
    book.carries_made += 1
    update_id = UpdateId(f"catch-up-{book.term}-{book.carries_made}")
    carry = Carry(update_id, record.place, version, checkpoint, waits_for_go=False)
    book.carries[record.place.engine_id] = carry
    return carry


def ended(book: Book, event: CarryEnded, now: float) -> list[Effect]:
    """The writer is done. Whether the engine holds anything is its own report's to say (INV-8)."""
    carry = book.carries.get(event.engine_id)
    if carry is None or carry.update_id != event.update_id:
        return []
    del book.carries[event.engine_id]
    if event.error is None:
        book.carry_tries.pop(event.engine_id, None)
    else:
        before = book.carry_tries.get(event.engine_id)
        failures = before.failures + 1 if before is not None else 1
        pause = min(RETRY_SECONDS[0] * 2 ** (failures - 1), RETRY_SECONDS[1])
        book.carry_tries[event.engine_id] = CarryTries(failures, now + pause)
        update = book.updates.get(event.update_id)
        if update is not None and isinstance(event.error, e.EngineDraining):
            update.leave(event.engine_id)
        if update is not None and update.phase is Phase.PREPARING:  # what it refused it will not report either
            update.lose(event.engine_id, str(event.error))
    model = book.engines[event.engine_id].state.model  # else its carry was forgotten with it
    return [ViewChanged(), *advance(book, model, now), *catch_up(book, model, now)]


def forget_carry(book: Book, engine_id: EngineId) -> None:
    """Another life took the engine's place, or it left: what was on its way is nobody's."""
    book.carries.pop(engine_id, None)
    book.carry_tries.pop(engine_id, None)


def published(book: Book, event: CheckpointPublished, now: float) -> list[Effect]:
    """A committed version can be brought by the coordinator from now on. Idempotent."""
    kept = event.checkpoint
    book.check_run(event.run_id)
    book.check_term(kept.model, event.term)
    model = book.model(kept.model)
    if model.checkpoints.get(kept.version.number) == kept:
        return []
    digest = _committed_digest(book, kept)
    if digest != kept.content_digest:
        raise e.VersionConflict(version=str(kept.version), expected=digest.hex(), got=kept.content_digest.hex())
    model.checkpoints[kept.version.number] = kept
    effects: list[Effect] = [Save(kept)]
    needed = {c.version.number for c in _sources(model).values()} | _kept_numbers(book, kept.model).keys()
    for number in sorted(model.checkpoints.keys() - needed)[: max(len(model.checkpoints) - MAX_CHECKPOINTS, 0)]:
        del model.checkpoints[number]
        effects.append(Save(CheckpointGone(kept.model, number)))
    return [*effects, ViewChanged(), *catch_up(book, kept.model, now)]


def _committed_digest(book: Book, kept: CheckpointKept) -> bytes:
    """Content of that version as engines reported it. Raises VersionUnavailable: the fleet never committed it."""
    digest = book.model(kept.model).digests.get(kept.version)
    if digest:
        return digest
    for update in book.updates.values():
        if update.version == kept.version and update.committed and update.content_digest:
            return update.content_digest
    applied = ", ".join(map(str, book.model(kept.model).served)) or "unset"
    raise e.VersionUnavailable(wanted=str(kept.version), applied=applied)


def _kept_numbers(book: Book, model: ModelName) -> dict[int, list[EngineId]]:
    """Numbers that engines stay at, and which."""
    found: dict[int, list[EngineId]] = {}
    for kept in book.kept.values():
        if kept.model == model:
            found.setdefault(kept.version.number, []).append(kept.engine_id)
    return found


def retired(book: Book, event: CheckpointRetired, now: float) -> list[Effect]:
    """Told before it is deleted. Idempotent. One that an engine stays at must stay: its next life needs it."""
    book.check_run(event.run_id)
    book.check_term(event.model, event.term)
    engines = _kept_numbers(book, event.model).get(event.number)
    if engines and event.number in book.model(event.model).checkpoints:
        raise e.CheckpointInUse(model=event.model, number=event.number, engines=sorted(engines))
    if book.model(event.model).checkpoints.pop(event.number, None) is None:
        return []
    return [Save(CheckpointGone(event.model, event.number)), ViewChanged()]

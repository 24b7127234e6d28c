"""Engines that stay at one version while the fleet moves on: for an evaluation, say.

Such an engine is in no plan and counts for no policy. What it may serve is that version alone, so its gate opens for
nothing else; where it does not hold it the coordinator brings it from a checkpoint. INV-5 holds for it too: it never
goes below what it applied in this life, so a keep that would need that is refused. The keep is the ledger's: it
outlives the engine's lives, its goodbyes and the coordinator.
"""

from __future__ import annotations

from controlplane.core import errors as e
from controlplane.core.engine_state import Held
from controlplane.core.fleet_book import Book
from controlplane.core.fleet_catch_up import CHECKPOINT, catch_up
from controlplane.core.fleet_effects import (
    BroadcastState,
    Effect,
    Save,
    ViewChanged,
)
from controlplane.core.fleet_events import KeepRequested, ReleaseRequested
from controlplane.core.fleet_records import EngineKept, EngineRecord, EngineReleased
from controlplane.core.versions import ModelName, WeightVersion


def keep(book: Book, event: KeepRequested, now: float) -> list[Effect]:
    """Stay at a committed version that the engine holds, or that a checkpoint can bring to it. Idempotent."""
    book.check_run(event.run_id)
    book.check_recovered()
    record = book.engines.get(event.engine_id)
    model = event.model if record is None else record.state.model
    if not model or event.model not in ("", model):
        raise e.UnknownEngine(engine_id=f"{event.engine_id} of model {event.model or '(not said)'}")
    kept = _kept(book, event, record, model)
    if book.kept.get(event.engine_id) == kept:
        return []
    if record is not None:
        _check_free(book, record, kept.version)
    book.kept[event.engine_id] = kept
    book.revision += 1
    return [Save(kept), BroadcastState(), ViewChanged(), *catch_up(book, model, now)]


def release(book: Book, event: ReleaseRequested, now: float) -> list[Effect]:
    """Go with the fleet again: by a catch-up, or the next push. Idempotent."""
    book.check_run(event.run_id)
    kept = book.kept.pop(event.engine_id, None)
    if kept is None:
        if event.engine_id not in book.engines:
            raise e.UnknownEngine(engine_id=event.engine_id)
        return []
    book.carry_tries.pop(event.engine_id, None)
    book.revision += 1
    effects: list[Effect] = [Save(EngineReleased(event.engine_id)), BroadcastState(), ViewChanged()]
    return [*effects, *catch_up(book, kept.model, now)]


def _kept(book: Book, event: KeepRequested, record: EngineRecord | None, model: ModelName) -> EngineKept:
    """Raises what makes the version impossible for the engine."""
    if book.model(model).frozen:
        raise e.ModelFrozen(model=model, problem=f"{event.engine_id} stays at what it loaded anyway")
    checkpoint = book.model(model).checkpoints.get(event.number)
    committed = _committed(book, model)
    held = record.state.weights if record is not None else None
    if isinstance(held, Held) and held.version.number == event.number and event.number in committed:
        return EngineKept(event.engine_id, model, held.version, held.content_digest)
    if checkpoint is None:
        raise e.CheckpointUnknown(model=model, number=event.number)
    if record is not None:
        _check_reachable(record, event.number)
    return EngineKept(event.engine_id, model, checkpoint.version, checkpoint.content_digest)


def _check_reachable(record: EngineRecord, number: int) -> None:
    """INV-5: one life of an engine never goes back."""
    engine_id, applied = record.place.engine_id, record.state.applied
    if record.session is not None and applied is not None and applied.number > number:
        raise e.StaleVersion(engine_id=engine_id, applied=applied.number, got=number)
    if CHECKPOINT not in record.capabilities:
        raise e.UnsupportedByEngine(engine_id=engine_id, what="versions from checkpoints")


def _committed(book: Book, model: ModelName) -> set[int]:
    """Numbers that the fleet is known to have committed."""
    found = book.model(model)
    served = [v.number for v in found.served]
    latest = [c.version.number for c in found.commits.latest]
    return {*served, *latest, *found.checkpoints}


def _check_free(book: Book, record: EngineRecord, wanted: WeightVersion) -> None:
    """An engine in the middle of an update would hold another version than this in a moment."""
    engine_id = record.place.engine_id
    if record.place.unit:
        raise e.InvalidRequest(field="engine_id", problem=f"{engine_id} serves in unit {record.place.unit}, as a whole")
    update, carry = book.open_update(record.state.model), book.carries.get(engine_id)
    if update is not None and engine_id in update.outcomes:
        raise e.UpdateInProgress(update_id=update.update_id, version=str(update.version))
    if carry is not None and carry.version != wanted:
        raise e.UpdateInProgress(update_id=carry.update_id, version=str(carry.version))

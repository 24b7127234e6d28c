"""A dry run: what an update would do if it began now. Reads the book and changes nothing: no number is used.

What would refuse the update is named beside the plan that there would be, not instead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from controlplane.core import errors as e
from controlplane.core.engine_state import HoldKind, Life, Residency
from controlplane.core.fleet_book import Book
from controlplane.core.fleet_plans import (
    Asked,
    able_engines,
    check_enough,
    check_formats,
    check_ranks,
    plan_of,
    policy_of,
    required_of,
)
from controlplane.core.fleet_records import EngineRecord, TrainerRecord
from controlplane.core.names import natural_key
from controlplane.core.plan import LinkFate, Plan, Transport
from controlplane.core.planner import devices_of, misfit
from controlplane.core.versions import EngineId, ModelName


@dataclass(frozen=True, slots=True)
class Preview:
    """The answer."""

    model: ModelName
    trainer: TrainerRecord
    plan: Plan
    left_out: tuple[tuple[EngineId, str], ...]
    """Engines of the model that take no part, and why."""
    problems: tuple[e.WeightplaneError, ...]
    """What would refuse it."""
    notes: tuple[str, ...]
    """What refuses nothing, and may surprise."""


def preview(book: Book, model: str, transport: Transport | None, fate: LinkFate | None) -> Preview:
    """As if `transport` and `fate` were the settings, where they are given. An empty model: the one with a trainer.

    Raises:
        InvalidRequest: no such trainer is known, or several are.
    """
    if transport is Transport.CHECKPOINT:
        raise e.InvalidRequest(field="transport", problem="no rank sends a checkpoint; the coordinator names it")
    trainer = _trainer(book, model)
    name, asked = trainer.model, Asked(trainer.avoid, None, transport, fate)
    able = able_engines(book, name, trainer.ranks)
    required = required_of(book, able)
    refusals = (
        _refusal(book.check_recovered),
        _refusal(lambda: _check_no_update(book, name)),
        _refusal(lambda: check_enough(book, name, policy_of(book, name), able)),
        _refusal(lambda: check_ranks(book, trainer)),
        _refusal(lambda: check_formats([r for r in able if r.place.engine_id in required], trainer.load)),
    )
    plan = Plan(book.plan_revision, ())
    if able and trainer.ranks:
        plan = plan_of(book, trainer, able, required, asked)
    planned = {r.place.engine_id for r in able}
    left_out = [r for r in _by_name(book.of_model(name)) if r.place.engine_id not in planned]
    return Preview(
        name,
        trainer,
        plan,
        tuple((r.place.engine_id, _why_left_out(book, r, trainer)) for r in left_out),
        tuple(refusal for refusal in refusals if refusal is not None),
        tuple(_notes(book, trainer, able)),
    )


def _by_name(records: Iterable[EngineRecord]) -> list[EngineRecord]:
    return sorted(records, key=lambda r: natural_key(r.place.engine_id))


def _trainer(book: Book, model: str) -> TrainerRecord:
    known = sorted(book.trainers, key=natural_key)
    wanted = [ModelName(model)] if model else known
    if not known or wanted[0] not in known:
        raise e.InvalidRequest(field="model", problem=f"no trainer{f' of {model}' if model else ''} is known here")
    if len(wanted) > 1:
        raise e.InvalidRequest(field="model", problem=f"name one of those with a trainer: {', '.join(known)}")
    return book.trainers[wanted[0]]


def _refusal(check: Callable[[], None]) -> e.WeightplaneError | None:
    """What an update would be refused with by this check."""
    try:
        check()
    except e.WeightplaneError as error:
        return error
    return None


def _check_no_update(book: Book, model: ModelName) -> None:
    current = book.open_update(model)
    if current is not None:
        raise e.UpdateInProgress(update_id=current.update_id, version=str(current.version))


def _why_left_out(book: Book, record: EngineRecord, trainer: TrainerRecord) -> str:
    state = record.state
    if record.session is None:
        return "silent: UNKNOWN"
    kept = book.kept_at(record)
    if kept is not None:
        return f"it stays at version {kept.version}"
    if state.life is not Life.RUNNING:
        return f"its engine is {state.life.value}"
    if state.residency is not Residency.AWAKE:
        return "asleep" if state.residency is Residency.ASLEEP else "only its weights are in memory"
    draining = state.held_by(HoldKind.DRAINING)
    if draining is not None:
        return f"draining, asked by {draining}"
    return str(misfit(record.place, devices_of(trainer.ranks)))


def _notes(book: Book, trainer: TrainerRecord, able: Sequence[EngineRecord]) -> list[str]:
    notes = []
    if trainer.session is None:
        gone = "left" if trainer.left else "is not connected"
        notes.append(f"trainer {trainer.trainer_id} {gone}: the plan is from what it said last")
    if trainer.ranks and trainer.load is None:
        notes.append(f"trainer {trainer.trainer_id} does not state what it sends: no sizes are known")
    units = {r.place.unit: r for r in able if r.place.unit}
    for unit, member in sorted(units.items(), key=lambda item: natural_key(item[0])):
        here, size = sum(r.live for r in book.unit(member)), member.place.unit_size
        if here < size:
            notes.append(f"unit {unit} has {here} of its {size} engines here: its gate stays shut")
    return notes

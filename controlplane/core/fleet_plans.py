"""Who takes part in an update, and the plan for it: of the one that begins, and of the one that would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from controlplane.core import errors as e
from controlplane.core.engine_core import DELTA
from controlplane.core.engine_state import Held
from controlplane.core.fleet_book import Book
from controlplane.core.fleet_records import EngineRecord, TrainerRecord
from controlplane.core.layout import TAKES_FORMAT
from controlplane.core.names import natural_key
from controlplane.core.plan import LinkFate, Load, Plan, RankPlace, Transport
from controlplane.core.planner import Way, Ways, devices_of, make_plan, misfit
from controlplane.core.update_policy import UpdatePolicy
from controlplane.core.versions import EngineId, ModelName


def policy_of(book: Book, model: ModelName) -> UpdatePolicy:
    """The fleet's. A group is asked of the models whose engines are in it; of every model while nobody is in it."""
    policy, groups = book.settings.policy, _groups(book)
    asked = {g: n for g, n in policy.min_engines.items() if model in groups.get(g, {model})}
    return replace(policy, min_engines=asked)


def _groups(book: Book) -> dict[str, set[ModelName]]:
    found: dict[str, set[ModelName]] = {}
    for record in book.engines.values():
        found.setdefault(record.place.group, set()).add(record.state.model)
    return found


def taking_part(
    book: Book, model: ModelName, policy: UpdatePolicy, ranks: Sequence[RankPlace] | None
) -> tuple[list[EngineRecord], frozenset[EngineId]]:
    """The engines of an update that these ranks send, or the coordinator (None), and who of them is required.

    Raises:
        NoEngines, NotEnoughEngines.
    """
    able = able_engines(book, model, ranks)
    check_enough(book, model, policy, able)
    return able, required_of(book, able)


def able_engines(book: Book, model: ModelName, ranks: Sequence[RankPlace] | None) -> list[EngineRecord]:
    """Who could take an update; who stays at a version takes none. From ranks: whom they can feed, also those that
    sleep for their trainer; one that came while they were away may be a misfit. From the coordinator: whose devices
    nobody else may hold."""
    others = [r for r in book.of_model(model) if book.kept_at(r) is None]
    if ranks is None:
        return [r for r in others if r.able and not book.lent(r)]
    able = [r for r in others if r.able or book.asleep_for_trainer(r)]
    held = devices_of(ranks)
    return [r for r in able if misfit(r.place, held) is None]


def check_enough(book: Book, model: ModelName, policy: UpdatePolicy, able: Sequence[EngineRecord]) -> None:
    """Raises NoEngines, NotEnoughEngines."""
    if not able:
        raise e.NoEngines(model=model, known=len(book.of_model(model)))
    groups = Counter(r.place.group for r in able)
    for group, needed in policy.min_engines.items():
        if groups[group] < needed:
            raise e.NotEnoughEngines(model=model, group=group, live=groups[group], needed=needed)


def check_formats(required: Sequence[EngineRecord], load: Load | None) -> None:
    """Those that say which formats they take must take the trainer's. Raises FormatMismatch, with the first by name."""
    if load is None or not load.weights_format:
        return
    for record in sorted(required, key=lambda r: natural_key(r.place.engine_id)):
        takes = [c.removeprefix(TAKES_FORMAT) for c in record.capabilities if c.startswith(TAKES_FORMAT)]
        if takes and load.weights_format not in takes:
            expected = f"{', '.join(takes)} ({record.place.engine_id})"
            raise e.FormatMismatch(expected=expected, got=load.weights_format)


def required_of(book: Book, able: Sequence[EngineRecord]) -> frozenset[EngineId]:
    """The routable; if none is, every able engine. The other able ones are optional. A unit takes part as a whole."""
    required = [r for r in able if book.routable(r)] or able
    units = {r.place.unit for r in required if r.place.unit}
    whole = [*required, *(r for r in able if r.place.unit in units)]
    return frozenset(r.place.engine_id for r in whole)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request for a plan says beside whose it is."""

    avoid: Mapping[Way, str]
    base: Held | None = None
    transport: Transport | None = None
    """Before the setting; None: the setting counts."""
    fate: LinkFate | None = None


def plan_of(
    book: Book, trainer: TrainerRecord, live: Sequence[EngineRecord], required: frozenset[EngineId], asked: Asked
) -> Plan:
    """From what is known now, for engines that fit. Raises CoordinatorRecovering."""
    check_ranks(book, trainer)
    ways = Ways(
        sends=trainer.transports,
        forced=asked.transport or book.settings.transport,
        fate=asked.fate or book.settings.link_fate,
        avoid=asked.avoid,
        base=asked.base,
        holders=frozenset(r.place.engine_id for r in live if _holds(r, asked.base)),
    )
    return make_plan(book.plan_revision, [r.place for r in live], required, trainer.ranks, ways)


def check_ranks(book: Book, trainer: TrainerRecord) -> None:
    """Raises CoordinatorRecovering: a restart knows the lease, but not yet whose devices are whose."""
    if not trainer.ranks:
        raise e.CoordinatorRecovering(term=book.term, engines=[f"trainer {trainer.trainer_id}"])


def _holds(record: EngineRecord, base: Held | None) -> bool:
    """INV-5: by its own report, version and content."""
    return base is not None and DELTA in record.capabilities and record.state.weights == base

"""Doubts: engines whose canary a strict majority of equal ones contradicts. The agent is told, and shuts its own gate.

Judged at each report that brings a canary, and before anything is decided by it: under a barrier no doubted engine ever
serves the version. A majority is one of all equal engines that an update waits for, not of those which spoke first. One
that comes late to a served version, and a rolling update's first, open before the others spoke.
"""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.core import errors as e
from controlplane.core.canary import Canary, Verification, judge
from controlplane.core.engine_state import EngineState, Held
from controlplane.core.fleet_book import Book, CarryTries, Doubt
from controlplane.core.fleet_events import BroadcastState, Effect
from controlplane.core.versions import EngineId, ModelName, WeightVersion

PAUSE_SECONDS = (1.0, 300.0)
"""First and longest wait before a doubted engine is brought up to date again; doubled with each doubt in a row."""


def judge_all(book: Book, model: ModelName, now: float) -> list[Effect]:
    """Doubt whom the others contradict; forget doubts of what is not held any more."""
    effects: list[Effect] = _forget(book, model)
    book.agreed = {name for name in book.agreed if not _of(book, name, model)}
    for (likeness, version), said in _alike(book, model):
        silent = _silent(book, model, likeness, version)
        contradicted = judge(said, book.settings.canary_tolerance, silent)
        if contradicted is None:
            continue
        for name in said.keys() - contradicted.keys():
            _agree(book, name, version)
        for name, cause in contradicted.items():
            if name not in book.doubts:
                _doubt(book, name, version, cause, now)
                effects = [BroadcastState()]
    return effects


def verification(book: Book, state: EngineState) -> Verification:
    """Of what the engine holds now."""
    if state.canary is None:
        return Verification.UNVERIFIED
    if state.canary.by_reference:
        return Verification.REFERENCE
    return Verification.MAJORITY if state.engine_id in book.agreed else Verification.UNVERIFIED


def _silent(book: Book, model: ModelName, likeness: str, version: WeightVersion) -> int:
    """Equal engines that an update is waiting for. A majority of those which were faster is no majority."""
    update = book.open_update(model)
    if update is None or update.version != version:
        return 0
    waited_for = (book.engines.get(o.engine_id) for o in update.required if not o.ended)
    return sum(record is not None and record.place.likeness == likeness for record in waited_for)


def _alike(book: Book, model: ModelName) -> Iterator[tuple[tuple[str, WeightVersion], dict[EngineId, Canary]]]:
    """What engines of one likeness that hold the same bytes said. A doubted one's word counts on until it is heeded."""
    groups: dict[tuple[str, WeightVersion, bytes], dict[EngineId, Canary]] = {}
    for record in book.of_model(model):
        weights, canary = record.state.weights, record.state.canary
        if record.session is None or not record.place.likeness or canary is None or not isinstance(weights, Held):
            continue
        key = (record.place.likeness, weights.version, weights.content_digest)
        groups.setdefault(key, {})[record.place.engine_id] = canary
    for (likeness, version, _), said in groups.items():
        yield (likeness, version), said


def _agree(book: Book, name: EngineId, version: WeightVersion) -> None:
    book.agreed.add(name)
    book.doubted_before.pop(name, None)
    for update in book.updates.values():
        if not update.phase.final and update.version == version:
            update.agree(name)


def _doubt(book: Book, name: EngineId, version: WeightVersion, cause: str, now: float) -> None:
    record = book.engines[name]
    book.doubts[name] = Doubt(record.state.incarnation, version, cause)
    times = book.doubted_before[name] = book.doubted_before.get(name, 0) + 1
    pause = min(PAUSE_SECONDS[0] * 2 ** (times - 1), PAUSE_SECONDS[1])
    book.carry_tries[name] = CarryTries(times, now + pause)
    error = e.CanaryDisagrees(engine_id=name, version=str(version), cause=cause)
    for update in book.updates.values():
        if not update.phase.final and update.version == version:
            update.doubt(name, error)


def _forget(book: Book, model: ModelName) -> list[Effect]:
    """INV-8: the engine's own report ends a doubt: it holds something else, or nothing, or lives another life."""
    over = [name for name, doubt in book.doubts.items() if _of(book, name, model) and not _stands(book, name, doubt)]
    for name in over:
        del book.doubts[name]
    return [BroadcastState()] if over else []


def _stands(book: Book, name: EngineId, doubt: Doubt) -> bool:
    record = book.engines.get(name)  # None: it left
    return record is not None and (record.state.incarnation, record.state.applied) == (doubt.incarnation, doubt.version)


def _of(book: Book, name: EngineId, model: ModelName) -> bool:
    record = book.engines.get(name)
    return record is None or record.state.model == model

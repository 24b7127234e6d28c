"""Doubts: engines whose canary a strict majority of equal ones contradicts. The agent is told, and shuts its own gate.

Judged at each report that may change the judgement, and before anything is decided by it: under a barrier no doubted
engine ever serves the version. A majority is one of all equal engines that an update waits for, not of those which
spoke first. One that comes late to a served version, and a rolling update's first, open before the others spoke.
"""

from __future__ import annotations

from controlplane.core import errors as e
from controlplane.core.canary import Canary, Range, Verification, judge
from controlplane.core.engine_state import EngineState, Held
from controlplane.core.fleet_book import Alike, Book, CarryTries, Doubt
from controlplane.core.fleet_effects import BroadcastState, Effect
from controlplane.core.fleet_records import EngineRecord
from controlplane.core.versions import EngineId, ModelName, WeightVersion

PAUSE_SECONDS = (1.0, 300.0)
"""First and longest wait before a doubted engine is brought up to date again; doubled with each doubt in a row."""


def judge_all(book: Book, model: ModelName, now: float) -> list[Effect]:
    """Doubt whom the others contradict; forget doubts of what is not held any more."""
    effects: list[Effect] = _forget(book, model)
    book.agreed = {name for name in book.agreed if not _of(book, name, model)}
    groups = _alike(book, model)
    book.ranges[model] = {key: _range(said) for key, said in groups.items()}
    for (likeness, version, _), said in groups.items():
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


def to_be_judged(book: Book, record: EngineRecord, before: EngineState | None) -> bool:
    """Whether this report may change whom the others contradict, or has to be counted for now: else judging all
    engines at each report of each is the square of the fleet.

    While all answers agree nobody is contradicted, whoever speaks, falls silent or is still to speak; that most of them
    agree is then found at the decision, which judges them all.
    """
    state, model = record.state, record.state.model
    spoke = before is None or (before.weights, before.canary) != (state.weights, state.canary)
    if spoke:
        _hear(book, record)
    tolerance = book.settings.canary_tolerance
    calm = all(answers.within(tolerance) for answers in book.ranges.get(model, {}).values())
    if not calm or book.doubts:
        return True
    if not spoke:
        return False
    book.agreed.discard(state.engine_id)
    update = book.open_update(model)
    return state.applied is not None and (update is None or update.version != state.applied)


def _hear(book: Book, record: EngineRecord) -> None:
    """Answers that are not given any more stay in the range until all are judged: it may only be too wide."""
    key, canary = _key(record), record.state.canary
    if key is not None and canary is not None:
        book.ranges.setdefault(record.state.model, {}).setdefault(key, Range()).widen(canary.prompt_logprobs)


def _range(said: dict[EngineId, Canary]) -> Range:
    answers = Range()
    for canary in said.values():
        answers.widen(canary.prompt_logprobs)
    return answers


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


def _alike(book: Book, model: ModelName) -> dict[Alike, dict[EngineId, Canary]]:
    """What engines of one likeness that hold the same bytes said. A doubted one's word counts on until it is heeded."""
    groups: dict[Alike, dict[EngineId, Canary]] = {}
    for record in book.of_model(model):
        key, canary = _key(record), record.state.canary
        if key is not None and canary is not None:
            groups.setdefault(key, {})[record.place.engine_id] = canary
    return groups


def _key(record: EngineRecord) -> Alike | None:
    """None: it can be compared with nobody."""
    weights = record.state.weights
    if record.session is None or not record.place.likeness or not isinstance(weights, Held):
        return None
    return record.place.likeness, weights.version, weights.content_digest


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

"""What happened to the fleet, as the difference between two views of it: for people, in words that stay.

Pure but for the memory of the latest ones, which is bounded. What passed between two views is not told: the views are
what people saw, and the ledger has every decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from controlplane.rpc.enum_words import word_of
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2, version_pb2

KEPT = 100
"""Events that are remembered, and shown in each view."""
AT_ONCE = 50
"""Of one difference: a fleet that vanishes at once must not push out how that began."""
MAX_TEXT_LENGTH = 512
ALARMING_WORDS = frozenset({"poisoned", "dead", "stalled"})

View = operator_pb2.FleetView
Event = operator_pb2.FleetEvent


class Happenings:
    """The latest events of one coordinator's life, newest first."""

    def __init__(self) -> None:
        self._before: View | None = None
        self._events: deque[Event] = deque(maxlen=KEPT)

    def see(self, view: View) -> None:
        """Note what is new in `view`, and write the latest events into it."""
        if self._before is not None:
            for event in islice(changes(self._before, view), AT_ONCE):
                event.time.CopyFrom(view.time)
                self._events.appendleft(event)
        self._before = view
        view.events.extend(self._events)

    def show(self, view: View) -> None:
        """Write the latest events into a view that is nobody's next one."""
        view.events.extend(self._events)


def changes(before: View, after: View) -> Iterator[Event]:
    """What differs, undated: of the whole first, then of models, updates, trainers and engines."""
    yield from _coordinator(before, after)
    yield from _models(before, after)
    yield from _updates(before, after)
    yield from _trainers(before, after)
    yield from _engines(before, after)


def _coordinator(before: View, after: View) -> Iterator[Event]:
    if before.recovering and not after.recovering:
        yield _event("recovered", "", "every known engine has reported, or its time is over")
    if after.ledger_regressed and not before.ledger_regressed:
        yield _event("ledger_regressed", "", after.ledger_regressed, alarming=True)


def _models(before: View, after: View) -> Iterator[Event]:
    known = {m.model: m for m in before.state.models}
    for model in after.state.models:
        old = known.get(model.model, fleet_pb2.ModelState())
        if list(old.served) != list(model.served):
            now = " and ".join(map(_version, model.served)) or "nothing"
            yield _event("model_served", model.model, f"the fleet serves {now}; ordinal {model.ordinal}")
        if model.term > old.term:
            yield _event("term_given", model.model, f"term {model.term} was given to a trainer")


def _updates(before: View, after: View) -> Iterator[Event]:
    known = {u.update_id: u.phase for u in before.updates}
    for update in reversed(after.updates):
        phase = known.get(update.update_id)
        if phase == update.phase:
            continue
        word = word_of(fleet_pb2.UpdatePhase, update.phase)
        name = {"preparing": "update_began", "go": "update_went_go"}.get(word, "update_decided")
        cause = f": {update.cause}" if update.cause else ""
        text = f"version {_version(update.version)} {word}{cause}"
        alarming = update.phase in (fleet_pb2.UPDATE_PHASE_FAILED, fleet_pb2.UPDATE_PHASE_DEGRADED)
        yield _event(name, update.model, text, update.update_id, alarming=alarming)


def _trainers(before: View, after: View) -> Iterator[Event]:
    known = {t.trainer_id: t for t in before.trainers}
    for trainer in after.trainers:
        old = known.get(trainer.trainer_id, operator_pb2.TrainerView())
        if trainer.connected and (not old.connected or old.term != trainer.term):
            yield _event("trainer_joined", trainer.trainer_id, f"{trainer.rank_count} ranks, term {trainer.term}")
        elif old.connected and trainer.left:
            yield _event("trainer_left", trainer.trainer_id, "it said goodbye")
        elif old.connected and not trainer.connected:
            yield _event("trainer_silent", trainer.trainer_id, "its session is over", alarming=True)
        known_lost = old.status.lost_ranks if old.incarnation == trainer.incarnation else ()
        for lost in list(trainer.status.lost_ranks)[len(known_lost) :]:
            yield _event("rank_lost", trainer.trainer_id, f"rank {lost.rank}: {lost.cause}", alarming=True)


def _engines(before: View, after: View) -> Iterator[Event]:
    known = {e.status.engine.engine_id: e for e in before.engines}
    for engine in after.engines:
        old = known.pop(engine.status.engine.engine_id, None)
        yield from _engine(old, engine)
    for name in known:
        yield _event("engine_left", name, "it said goodbye")


def _engine(old: operator_pb2.EngineView | None, new: operator_pb2.EngineView) -> Iterator[Event]:
    status = new.status
    name, update_id = status.engine.engine_id, status.update.update_id
    if old is None or old.status.engine.incarnation != status.engine.incarnation:
        again = "" if old is None else ", a new life"
        yield _event("engine_joined", name, f"at {new.endpoint}, {status.word}{again}")
        return
    if old.known and not new.known:
        yield _event("engine_unknown", name, f"silent; it was {old.status.word}", alarming=True)
        return
    if new.known and not old.known:
        yield _event("engine_heard", name, f"heard again: {status.word}")
    elif old.status.word != status.word:
        applied = f", holds {_version(status.applied)}" if status.HasField("applied") else ""
        why = f": {status.poison_cause}" if status.weights == engine_pb2.WEIGHTS_STATE_POISONED else ""
        text = f"{old.status.word} → {status.word}{applied}{why}"
        yield _event("engine_state", name, text, update_id, alarming=status.word in ALARMING_WORDS)
    if status.HasField("refused") and _refusal(old.status) != _refusal(status):
        refused = status.refused
        yield _event("version_refused", name, f"{_version(refused.version)}: {refused.reason}", update_id)


def _refusal(status: engine_pb2.EngineStatus) -> tuple[int, str]:
    return status.refused.version.number, status.refused.reason


def _event(name: str, subject: str, text: str, update_id: str = "", *, alarming: bool = False) -> Event:
    return Event(name=name, subject=subject, text=text[:MAX_TEXT_LENGTH], update_id=update_id, alarming=alarming)


def _version(version: version_pb2.WeightVersion) -> str:
    return f"{version.term}.{version.number}"

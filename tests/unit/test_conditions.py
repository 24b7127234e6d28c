"""Conditions: what is true of an engine, why, and since when."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

from controlplane.core import engine_events as events
from controlplane.core.conditions import (
    Condition,
    ConditionType,
    dated,
    engine_conditions,
    fleet_conditions,
    rests_on,
)
from controlplane.core.engine_state import (
    EngineState,
    Held,
    Hold,
    HoldKind,
    Life,
    Poisoned,
    Progress,
    Residency,
    Stage,
    Unset,
)
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from tests.support.engine_core import LAYOUT, Agent

V1, V2 = WeightVersion(1, Term(1)), WeightVersion(2, Term(1))
NEW = EngineState(RunId("run"), ModelName("policy"), EngineId("e0"), Incarnation("i"))
SERVING = replace(NEW, life=Life.RUNNING, weights=Held(V1, b"d"))


def of(state: EngineState, *served: WeightVersion) -> dict[ConditionType, Condition]:
    return {c.type: c for c in engine_conditions(state, frozenset(served))}


def test_of_an_engine_that_serves_every_condition_but_updating_is_true() -> None:
    found = of(SERVING, V1)
    true = {t for t, c in found.items() if c.status}
    assert true == set(found) - {ConditionType.UPDATING}


def test_reasons_say_why_a_gate_is_shut() -> None:
    shut = {
        "Starting": (NEW, (V1,)),
        "NotServed": (SERVING, (V2,)),
        "Unset": (replace(NEW, life=Life.RUNNING), (V1,)),
        "Held": (replace(SERVING, holds=frozenset({Hold(HoldKind.OPERATOR, "ann")})), (V1,)),
    }
    for reason, (state, served) in shut.items():
        gate = of(state, *served)[ConditionType.GATE_OPEN]
        assert (gate.status, gate.reason) == (False, reason)
    assert "operator (ann)" in of(*_held())[ConditionType.GATE_OPEN].message


def _held() -> tuple[EngineState, WeightVersion]:
    return replace(SERVING, holds=frozenset({Hold(HoldKind.OPERATOR, "ann")})), V1


def test_poison_and_sleep_are_told() -> None:
    assert of(replace(SERVING, weights=Poisoned("boom")), V1)[ConditionType.WEIGHTS_HELD].reason == "Poisoned"
    asleep = of(replace(SERVING, residency=Residency.ASLEEP), V1)[ConditionType.RESIDENT]
    assert (asleep.status, asleep.reason) == (False, "Asleep")


def test_inv8_of_a_silent_engine_everything_is_unknown_but_the_silence() -> None:
    found = {c.type: c for c in fleet_conditions(SERVING, frozenset({V1}), known=False, routable=False)}
    known, routable = found.pop(ConditionType.KNOWN), found.pop(ConditionType.ROUTABLE)
    assert (known.status, routable.status) == (False, False)
    assert {c.status for c in found.values()} == {None}


def test_since_is_when_the_status_changed_and_not_the_reason() -> None:
    first = dated(engine_conditions(replace(SERVING, weights=Poisoned("a")), frozenset({V1})), (), 1.0)
    again = dated(engine_conditions(replace(NEW, life=Life.RUNNING), frozenset({V1})), first, 2.0)
    healed = dated(engine_conditions(SERVING, frozenset({V1})), again, 3.0)
    held = [{c.type: c for c in x}[ConditionType.WEIGHTS_HELD] for x in (first, again, healed)]
    assert [(c.status, c.reason, c.since) for c in held] == [
        (False, "Poisoned", 1.0),
        (False, "Unset", 1.0),
        (True, "Applied", 3.0),
    ]


def test_conditions_are_equal_wherever_what_they_rest_on_is() -> None:
    """All others of a state's fields take other values here, too."""
    progress = [Progress(UpdateId("u"), v, s, n, "R") for v in (V1, V2) for s in Stage for n in (0, 7)]
    parts = {
        "life": (Life.RUNNING, Life.DEAD),
        "weights": (Unset(), Held(V1, b"d"), Held(V2, b"d"), Poisoned("a"), Poisoned("b")),
        "residency": (Residency.AWAKE, Residency.ASLEEP),
        "holds": (frozenset(), frozenset({Hold(HoldKind.OPERATOR, "ann")})),
        "progress": (None, *progress),
        "frozen": (False, True),
        "live_requests": (0, 1),
    }
    assert parts.keys() <= {f.name for f in fields(EngineState)}
    found: dict[object, list[Condition]] = {}
    for values in product(*parts.values()):
        state = replace(NEW, **dict(zip(parts, values, strict=True)))  # type: ignore[arg-type]
        for served in (frozenset({V1}), frozenset({V1, V2})):
            fresh = engine_conditions(state, served)
            assert found.setdefault(rests_on(state, served), fresh) == fresh
    assert len({tuple(c) for c in found.values()}) > len(parts["progress"]), "they do change"


def test_a_chunk_makes_no_conditions_anew_and_the_commit_does() -> None:
    agent = Agent()
    agent.open(1)
    agent.handle(events.LayoutArrived(1, LAYOUT))
    before = agent.core.conditions
    agent.chunk(1)
    agent.handle(events.RequestsCounted(3, 0))
    assert agent.core.conditions is before
    agent.handle(events.BytesVerified(1))
    agent.commit(1)
    updating = {c.type: c for c in agent.core.conditions}[ConditionType.UPDATING]
    assert (updating.status, updating.reason) == (True, "Installing")

"""Conditions: what is true of an engine, why, and since when."""

from __future__ import annotations

from dataclasses import replace

from controlplane.core.conditions import Condition, ConditionType, dated, engine_conditions, fleet_conditions
from controlplane.core.engine_state import EngineState, Held, Hold, HoldKind, Life, Poisoned, Residency
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, WeightVersion

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

"""Conditions: what is true of an engine, why, and since when; in the manner of Kubernetes.

A condition is true, false or unknown. `since` is when that last changed; a new reason alone does not move it. They are
for people and dashboards: nothing is decided by them. The agent derives those of its engine, the coordinator all.
Source of the form: the conditions of the Kubernetes API conventions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from controlplane.core.engine_state import Activity, EngineState, Held, Life, Poisoned, Residency
from controlplane.core.versions import WeightVersion


class ConditionType(Enum):
    RUNNING = "Running"
    """The engine's processes run."""
    WEIGHTS_HELD = "WeightsHeld"
    """The weights are exactly one version."""
    CURRENT = "Current"
    """That version is one that the fleet serves."""
    UPDATING = "Updating"
    """An update is under way on it."""
    RESIDENT = "Resident"
    """Weights and KV cache are in device memory."""
    GATE_OPEN = "GateOpen"
    """Tokens may leave."""
    KNOWN = "Known"
    """The coordinator hears it (INV-8). Only the coordinator says so."""
    ROUTABLE = "Routable"
    """Rollout clients are sent to it (INV-10). Only the coordinator says so."""


@dataclass(frozen=True, slots=True)
class Condition:
    type: ConditionType
    status: bool | None
    """None: unknown."""
    reason: str
    """One CamelCase word."""
    message: str = ""
    since: float = 0.0
    """Monotonic seconds of whoever keeps it."""


def engine_conditions(state: EngineState, served: frozenset[WeightVersion]) -> list[Condition]:
    """What the state says of itself; undated."""
    activity = state.activity
    update = "" if state.progress is None else f"version {state.progress.version}"
    if state.progress is not None and activity is Activity.IDLE:
        update += f" {state.progress.stage.value}"
    return [
        Condition(ConditionType.RUNNING, state.life is Life.RUNNING, state.life.value.capitalize()),
        _weights_held(state),
        _current(state, served),
        Condition(ConditionType.UPDATING, activity is not Activity.IDLE, activity.value.capitalize(), update),
        Condition(ConditionType.RESIDENT, state.residency is Residency.AWAKE, state.residency.value.capitalize()),
        _gate_open(state, served),
    ]


def rests_on(state: EngineState, served: frozenset[WeightVersion]) -> tuple[object, ...]:
    """All that `engine_conditions` looks at: while this is equal, so are they. Chunks and tokens do not move it."""
    update = None if state.progress is None else (state.progress.version, state.progress.stage)
    return state.life, state.weights, state.residency, state.holds, update, served


def fleet_conditions(
    state: EngineState, served: frozenset[WeightVersion], *, known: bool, routable: bool
) -> list[Condition]:
    """What the coordinator says of an engine: of one that it does not hear everything else is unknown (INV-8)."""
    mine = engine_conditions(state, served)
    if not known:
        mine = [replace(c, status=None, reason="Silent", message=f"last heard: {c.reason}") for c in mine]
    gate = mine[-1]
    return [
        *mine,
        Condition(ConditionType.KNOWN, known, "SessionOpen" if known else "Silent"),
        Condition(ConditionType.ROUTABLE, routable, "GateOpen" if routable else gate.reason, gate.message),
    ]


def dated(fresh: Iterable[Condition], before: Iterable[Condition], now: float) -> tuple[Condition, ...]:
    """`fresh` with the times of `before` where the status is the same."""
    known = {c.type: c for c in before}
    return tuple(_dated(c, known.get(c.type), now) for c in fresh)


def _dated(fresh: Condition, before: Condition | None, now: float) -> Condition:
    if before is None or before.status != fresh.status:
        return replace(fresh, since=now)
    if (before.reason, before.message) == (fresh.reason, fresh.message):
        return before
    return replace(fresh, since=before.since)


def _weights_held(state: EngineState) -> Condition:
    match state.weights:
        case Held(version):
            return Condition(ConditionType.WEIGHTS_HELD, True, "Applied", f"version {version}")
        case Poisoned(cause):
            return Condition(ConditionType.WEIGHTS_HELD, False, "Poisoned", cause)
        case _:
            return Condition(ConditionType.WEIGHTS_HELD, False, "Unset")


def _current(state: EngineState, served: frozenset[WeightVersion]) -> Condition:
    wanted = ", ".join(str(v) for v in sorted(served)) or "nothing"
    if state.applied in served:
        return Condition(ConditionType.CURRENT, True, "Served", f"version {state.applied}")
    reason = "Unset" if state.applied is None else "NotServed"
    return Condition(ConditionType.CURRENT, False, reason, f"the fleet serves {wanted}")


def _gate_open(state: EngineState, served: frozenset[WeightVersion]) -> Condition:
    if state.gate_open(served):
        return Condition(ConditionType.GATE_OPEN, True, "Open")
    holds = ", ".join(sorted(str(h) for h in state.holds))
    if state.life is not Life.RUNNING:
        return Condition(ConditionType.GATE_OPEN, False, state.life.value.capitalize())
    if holds:
        return Condition(ConditionType.GATE_OPEN, False, "Held", holds)
    return Condition(ConditionType.GATE_OPEN, False, _current(state, served).reason)

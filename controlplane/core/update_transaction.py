"""The fleet commit: ready, go, decide (INV-9).

Fed with what engines themselves report in their present incarnation (INV-8), and with silence. Until go an abort
costs nothing; after go nothing waits for ever: each required engine ends applied, failed or lost, and then it is
decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from controlplane.core.canary import Verification
from controlplane.core.engine_state import EngineState, Held, HoldKind, Stage
from controlplane.core.errors import CanaryDisagrees, some
from controlplane.core.plan import Plan
from controlplane.core.update_outcomes import Outcome, Tally, Times
from controlplane.core.update_policy import Mode, UpdatePolicy
from controlplane.core.versions import EngineId, ModelName, Term, UpdateId, WeightVersion


class Phase(Enum):
    PREPARING = "preparing"
    GO = "go"
    COMMITTED = "committed"
    DEGRADED = "degraded"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self not in (Phase.PREPARING, Phase.GO)


PHASE_MOVES = frozenset(
    {
        (Phase.PREPARING, Phase.GO),
        (Phase.PREPARING, Phase.FAILED),
        (Phase.GO, Phase.COMMITTED),
        (Phase.GO, Phase.DEGRADED),
        (Phase.GO, Phase.FAILED),
    }
)
"""How an update moves. After go nothing waits for ever, and nothing goes back."""


_IN_THE_WEIGHTS = (Stage.INSTALLING, Stage.APPLIED, Stage.FAILED)
"""Of an update at an engine: from here on it is decided by what the engine holds, whatever holds its gate."""


@dataclass
class UpdateTransaction:
    """One update, from begin to decision."""

    update_id: UpdateId
    request_id: str
    model: ModelName
    version: WeightVersion
    term: Term
    step: int | None
    plan: Plan
    deadline: float
    """Monotonic seconds: of readiness while preparing, of the installs after go."""
    policy: UpdatePolicy = field(default_factory=UpdatePolicy)
    phase: Phase = Phase.PREPARING
    cause: str = ""
    doomed: bool = False
    """The coordinator restarted before go: its trainer begins anew."""
    rolled: bool = False
    """The fleet serves it already, beside what it served before (ROLLING); it is never aborted after that."""
    awaits_until: float = 0.0
    """Monotonic seconds: until then go waits for engines that are not required, but awaited."""
    layout_digest: bytes = b""
    byte_count: int = 0
    restores: WeightVersion | None = None
    """Of a rollback: the version whose weights it brings back, from a checkpoint, by the coordinator."""
    content_digest: bytes = b""
    """As the first engine that applied it reported it."""
    outcomes: dict[EngineId, Outcome] = field(default_factory=dict)
    times: Times = field(default_factory=Times)
    _tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self._tally = Tally()
        for outcome in self.outcomes.values():
            self._tally.count(outcome, 1)

    @property
    def went_go(self) -> bool:
        return self.phase is Phase.GO or self.committed

    @property
    def committed(self) -> bool:
        return self.phase in (Phase.COMMITTED, Phase.DEGRADED)

    @property
    def required(self) -> list[Outcome]:
        return [o for o in self.outcomes.values() if o.required]

    def note(self, state: EngineState, now: float) -> bool:
        """Take an engine's report. True if it changed an outcome."""
        old = self.outcomes.get(state.engine_id)
        if old is None:
            return False
        if state.incarnation != old.incarnation:  # L2: another life's word; the one that was asked is gone
            return self._put(_lost(old, "a new incarnation took its place"))
        if old.error_reason == CanaryDisagrees.reason:  # what it says of it from now on is that it heeded that
            return False
        left = self._drains(state) and self.leave(state.engine_id)
        return self._take(self.outcomes[state.engine_id], state, now) or left

    def _take(self, old: Outcome, state: EngineState, now: float) -> bool:
        progress = state.progress
        if progress is None or progress.update_id != self.update_id:  # another update came to it meanwhile
            return old.applied and self._put(self._applied(old, state))
        outcome = replace(
            old,
            stage=progress.stage,
            lost=False,
            error_reason=progress.error_reason,
            error_message=progress.error_message,
            changed_tensors=progress.changed_tensors,
            tensor_count=progress.tensor_count,
        )
        if progress.timings is not None:
            self.times.installs[state.engine_id] = progress.timings
        self.times.stages.setdefault(state.engine_id, {}).setdefault(progress.stage, now)
        return self._put(self._applied(outcome, state) if progress.stage is Stage.APPLIED else outcome)

    def _drains(self, state: EngineState) -> bool:
        """It takes nothing new by somebody's word, and nothing of this update is in it."""
        progress = state.progress
        mine = progress is not None and progress.update_id == self.update_id and progress.stage in _IN_THE_WEIGHTS
        return state.held_by(HoldKind.DRAINING) is not None and not mine

    def leave(self, engine_id: EngineId) -> bool:
        """It drains: it, and its unit, are required no more, as if it had drained at begin; but somebody must be. True
        if that changed an outcome."""
        own = self.outcomes.get(engine_id)
        if own is None or not own.required:
            return own is not None and self._put(replace(own, awaited=False))
        leaving = [o for o in self.required if o is own or (o.unit and o.unit == own.unit)]
        if len(leaving) == len(self.required):
            return False
        for o in leaving:
            self._put(replace(o, required=False))
        return True

    def _applied(self, outcome: Outcome, state: EngineState) -> Outcome:
        """It says that it applied: is that what it holds now, and is it what the others hold?"""
        if not isinstance(state.weights, Held) or state.weights.version != self.version:  # poisoned since
            gone = "it applied the version and does not hold it any more"
            return replace(outcome, stage=Stage.FAILED, error_reason="ENGINE_POISONED", error_message=gone)
        digest, known = state.weights.content_digest, self.content_digest
        if known and digest != known:  # INV-6: one version is one content
            other = f"it holds {digest.hex()[:12]}, others hold {known.hex()[:12]}"
            return replace(outcome, stage=Stage.FAILED, error_reason="VERSION_CONFLICT", error_message=other)
        self.content_digest = digest
        by_reference = state.canary is not None and state.canary.by_reference
        verification = Verification.REFERENCE if by_reference else outcome.verification
        return replace(outcome, content_digest=digest, verification=verification)

    def doubt(self, engine_id: EngineId, error: CanaryDisagrees) -> bool:
        """It applied, and equal engines contradict it. True if it changed an outcome."""
        old = self.outcomes.get(engine_id)
        if old is None or not old.applied:
            return False
        doubted = replace(old, stage=Stage.FAILED, error_reason=error.reason, error_message=str(error))
        return self._put(doubted)

    def agree(self, engine_id: EngineId) -> None:
        """Most of the equal engines say what this one says."""
        old = self.outcomes.get(engine_id)
        if old is not None and old.applied and old.verification is Verification.UNVERIFIED:
            self._put(replace(old, verification=Verification.MAJORITY))

    def lose(self, engine_id: EngineId, cause: str) -> bool:
        """An engine fell silent for too long, also one that had applied. True if it changed an outcome."""
        old = self.outcomes.get(engine_id)
        return old is not None and not old.bad and self._put(_lost(old, cause))

    def next_phase(self, now: float, *, served_has_holder: Callable[[], bool]) -> tuple[Phase, str] | None:
        """The phase that follows from what is known, with its cause; None while nothing follows.

        `served_has_holder`: whether some live engine still holds a version that the fleet serves.
        """
        if self.phase is Phase.PREPARING and not self._just_waits(now):
            return self._judge_ready(now)
        if self.phase is Phase.GO:
            return self._decide(now, served_has_holder)
        return None

    def _just_waits(self, now: float) -> bool:
        """Before go: somebody is late, nobody is bad, and there is time."""
        if self.doomed or self._tally.bad or not self._tally.late:
            return False
        return now < self.deadline and (now < self.awaits_until or not any(o.awaited for o in self.outcomes.values()))

    @property
    def units(self) -> list[list[Outcome]]:
        """The required engines, by what counts together."""
        found: dict[str, list[Outcome]] = {}
        for o in self.required:
            found.setdefault(f"unit {o.unit}" if o.unit else f"engine {o.engine_id}", []).append(o)
        return list(found.values())

    @property
    def needed(self) -> int:
        """How many units."""
        return self.policy.needed(len(self.units))

    @property
    def may_roll(self) -> bool:
        """ROLLING: the first unit applied, so the fleet begins to serve the version."""
        if self.policy.mode is not Mode.ROLLING or self.phase is not Phase.GO or self.rolled:
            return False
        alone = any(o.applied and not o.unit for o in self.outcomes.values())
        return alone or any(all(o.applied for o in unit) for unit in self.units)

    def _judge_ready(self, now: float) -> tuple[Phase, str] | None:
        """Go when all that can be ready are, if they suffice. Who is slow is waited for until the deadline."""
        if self.doomed:
            return Phase.FAILED, "the coordinator restarted before go"
        bad = [o for o in self.required if o.bad]
        if not self._suffice([o for o in self.outcomes.values() if not o.bad]):
            return Phase.FAILED, some(bad, "; ") or "too few engines are left"
        waited_for = [o for o in self.outcomes.values() if o.required or (o.awaited and now < self.awaits_until)]
        late = [o for o in waited_for if not o.ready and not o.bad]
        if late and now < self.deadline:
            return None
        if not self._suffice([o for o in self.outcomes.values() if o.ready]):
            return Phase.FAILED, f"not ready in time: {', '.join(str(o.engine_id) for o in late)}"
        for o in late:
            self.lose(o.engine_id, "not ready in time")
        return Phase.GO, ""

    def _decide(self, now: float, served_has_holder: Callable[[], bool]) -> tuple[Phase, str] | None:
        if now >= self.deadline:
            for o in self.required:
                if not o.ended:
                    self.lose(o.engine_id, "no outcome before the deadline")
        if self._tally.open:
            return None
        bad = some((o for o in self.required if o.bad), "; ")
        applied = [o for o in self.outcomes.values() if o.applied]
        if self._suffice(applied):
            return Phase.COMMITTED, bad
        if self.rolled or (applied and not served_has_holder()):
            return Phase.DEGRADED, bad
        return Phase.FAILED, bad

    def _suffice(self, outcomes: list[Outcome]) -> bool:
        """Whether these would satisfy the policy: whole units for the quorum, and enough engines of each group."""
        there = {o.engine_id for o in outcomes}
        whole = sum(all(o.engine_id in there for o in unit) for unit in self.units)
        groups = Counter(o.group for o in outcomes)
        return whole >= self.needed and all(groups[g] >= n for g, n in self.policy.min_engines.items())

    def _put(self, outcome: Outcome) -> bool:
        old, self.outcomes[outcome.engine_id] = self.outcomes[outcome.engine_id], outcome
        self._tally.count(old, -1)
        self._tally.count(outcome, 1)
        return old != outcome


def _lost(old: Outcome, cause: str) -> Outcome:
    return replace(
        old,
        lost=True,
        error_reason=old.error_reason or "PEER_LOST",
        error_message=old.error_message or cause,
    )

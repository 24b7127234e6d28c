"""What an agent's core knows of one incarnation, and the few steps that all of its decisions are made of."""

from __future__ import annotations

from dataclasses import replace

from controlplane.core import engine_sleep
from controlplane.core import errors as e
from controlplane.core.conditions import Condition
from controlplane.core.engine_effects import Effect, Remember, Report
from controlplane.core.engine_events import CanaryDeferred, CanaryPassed
from controlplane.core.engine_state import (
    EngineState,
    Hold,
    HoldKind,
    Life,
    Poisoned,
    Progress,
    Refusal,
    Stage,
    Weights,
)
from controlplane.core.engine_update import Update
from controlplane.core.lag import Commits
from controlplane.core.layout import Expected, Layout
from controlplane.core.versions import Term, WeightVersion


class EngineAccount:
    """The state of one incarnation of one engine."""

    def __init__(self, state: EngineState, *, term: Term, coordinator_term: Term, number: int) -> None:
        """`term`, `coordinator_term` and `number` are the highest that the agent's disk remembers (INV-7)."""
        self.state = state
        self.served: frozenset[WeightVersion] = frozenset()
        self.commits = Commits()
        """Of the model's fleet, as far as this life was told: what a pin's lag is counted in."""
        self.term = term
        self.coordinator_term = coordinator_term
        self.number = number
        self.welcomed = False
        self.expected: Expected | None = None
        self.capabilities: frozenset[str] = frozenset()
        self.refused: Refusal | None = None
        """The latest version that this incarnation would not take, or could not."""
        self.conditions: tuple[Condition, ...] = ()
        self._conditions_rest_on: tuple[object, ...] = ()
        """What they were made of."""
        self._layouts: dict[bytes, Layout] = {}
        self._update: Update | None = None
        self._power = engine_sleep.Power()
        self._highest_applied = -1
        self._digest_of_highest = b""

    @property
    def gate_open(self) -> bool:
        return self.state.gate_open(self.served)

    @property
    def update(self) -> Update | None:
        return self._update

    def _fence(self, writer_term: Term, *, by_coordinator: bool) -> e.StaleTerm | None:
        """INV-7: a writer below the highest term that this agent ever saw; trainers and coordinators apart."""
        name, current = ("(coordinator)", self.coordinator_term) if by_coordinator else (self.state.model, self.term)
        return e.StaleTerm(model=name, got=writer_term, current=current) if writer_term < current else None

    def _receiving(self, stream: int) -> Update:
        update = self._update
        if update is None or update.stream != stream or not update.in_stream:
            progress = self.state.progress
            cause = progress.error_message if progress is not None and progress.error_message else "it ended"
            raise e.UpdateAborted(update_id=progress.update_id if progress else "", cause=cause)
        return update

    def _installing(self) -> Update:
        if self._update is None or not self.state.installing:
            raise AssertionError("no install is under way")
        return self._update

    def _check_frame_version(self, update: Update, version: WeightVersion) -> None:
        if version != update.version:
            raise e.FrameOutOfOrder(expected=f"version {update.version}", got=f"version {version}")

    def _become(
        self,
        life: Life | None = None,
        weights: Weights | None = None,
        holds: frozenset[Hold] | None = None,
    ) -> list[Effect]:
        if weights is not None:
            self._set_weights(weights)
        self.state = replace(
            self.state,
            life=self.state.life if life is None else life,
            holds=self.state.holds if holds is None else holds,
        )
        return [Report()]

    def _set_weights(self, weights: Weights) -> None:
        """Poison comes with its hold, and goes with it; what was unproven is gone."""
        poison = Hold(HoldKind.POISONED, self.state.engine_id)
        others = frozenset(h for h in self.state.holds if h.kind is not HoldKind.UNPROVEN)
        holds = others | {poison} if isinstance(weights, Poisoned) else others - {poison}
        canary = self.state.canary if weights == self.state.weights else None
        self.state = replace(self.state, weights=weights, holds=holds, canary=canary)

    def _progress(
        self,
        update: Update,
        stage: Stage,
        error: e.WeightplaneError | None = None,
        *,
        reason: str = "",
        message: str = "",
        applied: CanaryPassed | CanaryDeferred | None = None,
    ) -> None:
        self.state = replace(
            self.state,
            progress=Progress(
                update_id=update.update_id,
                version=update.version,
                stage=stage,
                bytes_received=update.assembly.byte_count if update.assembly else 0,
                error_reason=error.reason if error else reason,
                error_message=str(error) if error else message,
                timings=None if applied is None else applied.timings,
                changed_tensors=None if applied is None else applied.changed_tensors,
                tensor_count=len(update.assembly.layout.tensors) if applied is not None and update.assembly else 0,
            ),
        )

    def _see_number(self, number: int) -> list[Effect]:
        """Of a commit that was taken: what is noted now need not be when the install is over."""
        if number <= self.number:
            return []
        self.number = number
        return [self._remember()]

    def _remember(self) -> Remember:
        return Remember(self.term, self.coordinator_term, self.number)

"""The updater that vime's and slime's training actors hold, over `TrainerRank`.

    updater = WeightplaneUpdater(rank)                       # in place of UpdateWeightFromTensor, …FromDistributed
    updater.connect_rollout_engines(["engine-0", "engine-1"], None)
    updater.update_weights()                                 # on every rank
    updater.weight_version                                   # the coordinator's number

Promises: `weight_version` moves only when the fleet committed; an engine that the loop connected and that will not hold
the version is an error on every rank, with its outcome. One that is still on its way (it was new, and nobody waits for
new ones) is none: its gate is shut until it holds what the fleet serves. Engines are paused, updated and resumed by
their agents, found by the coordinator, and new ones are met by the next push: connecting makes no process groups,
costs nothing, and may be repeated.

Refuses Ray actors of engines that have no agent: they would keep old weights in silence. `rollout_engine_lock` is not
used, since writers are fenced by terms; nor are counts and offsets of GPUs, since slots come from device UUIDs. Weights
are pushed as the model holds them, in its own dtype: `quantization_config` has no place here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from controlplane.core.errors import InvalidRequest, UpdateFailed, some
from trainer_agent.rank.report import PushReport
from trainer_agent.rank.trainer_rank import TrainerRank

FINE = frozenset({"APPLIED", "RECEIVING", "READY", "INSTALLING"})
"""Outcomes at the decision; see `UpdateStage`. Any other says that the engine will not hold this version."""


class WeightplaneUpdater:
    """One for each rank; its calls are collective where `TrainerRank`'s are."""

    def __init__(self, rank: TrainerRank) -> None:
        self._rank = rank
        self._engine_ids: tuple[str, ...] = ()
        self._step = 0
        self.weight_version = 0
        """Number of the version that the fleet committed last. What a loop writes into it (slime sets a first one on
        resume) is overwritten by the next push: numbers are the coordinator's, and never go back."""
        self.report: PushReport | None = None
        """Of the last push that the fleet committed."""

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any = None,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Any] | None = None,
    ) -> None:
        """Say which engines this loop uses.

        Args:
            rollout_engines: engine ids, or objects with one in `weightplane_engine_id`.

        Raises:
            InvalidRequest: something else is among them, or an engine stands there twice. The former ones stay.
        """
        ids = [_engine_id(engine) for engine in rollout_engines]
        foreign = [repr(engine) for engine, found in zip(rollout_engines, ids, strict=True) if not found]
        if foreign:
            problem = f"no engine behind an agent of Weightplane: {', '.join(foreign)[:500]}; give engine ids"
            raise InvalidRequest(field="rollout_engines", problem=problem)
        if len(set(ids)) != len(ids):
            raise InvalidRequest(field="rollout_engines", problem=f"an engine stands there twice: {', '.join(ids)}")
        self._engine_ids = tuple(ids)

    def disconnect_rollout_engines(self) -> None:
        """Nothing is open between pushes; no engine is asked for from now on."""
        self._engine_ids = ()

    def update_weights(self, step: int | None = None) -> None:
        """Push; returns when the fleet decided. Collective. By default the step is one more than the last one.

        Raises:
            UpdateFailed: the fleet did not commit; or it did, and not all connected engines will hold the version
                (`weight_version` has moved then). Else as `TrainerRank.push` does.
        """
        self._step = self._step + 1 if step is None else step
        report = self._rank.push(self._step)
        self.report, self.weight_version = report, report.version.number
        outcomes = {e: report.outcomes.get(e, "NOT IN THE PLAN") for e in self._engine_ids}
        without = [engine_id for engine_id, outcome in outcomes.items() if outcome not in FINE]
        if without:
            raise UpdateFailed(
                update_id="",
                version=str(report.version),
                cause=f"the fleet committed without engines that this loop uses: {', '.join(without)}",
                outcomes=some((f"{engine_id} {outcome}" for engine_id, outcome in outcomes.items()), "; "),
            )


def _engine_id(engine: Any) -> str:
    found = engine if isinstance(engine, str) else getattr(engine, "weightplane_engine_id", "")
    return found if isinstance(found, str) else ""

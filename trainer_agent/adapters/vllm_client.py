"""vLLM's `VLLMWeightSyncClient` (0.32, structural) over `TrainerRank`: what its trainer engines call becomes one push.

    register()                                                                   # of `vllm_engine`
    client = WeightplaneSyncClient("coordinator:7070")
    engine = WeightTransferTrainerFactory.trainer_init(WeightplaneTrainerInitInfo(rank=0), client=client, source=source)
    engine.send_weights()
    client.report.version

Promises: between `start_weight_update` and `finish_weight_update` nothing leaves this process; `finish` is one whole,
versioned push, and returns when the fleet decided. So an update that breaks off has cost nothing, and pushes are
repeated as `TrainerRank` repeats them. The engine of `vllm_engine` needs none of these four calls; they are there for
engines that hand tensors over (`update_info["tensors"]`), and for vLLM's stock IPC engine over the source that `watch`
gives.

What the protocol cannot carry of the contract, and what becomes of it:

- It has no version. `weight_version` is a label that the caller makes up; the coordinator gives numbers. A label is
  refused, or, with `label_is_step`, noted as the trainer's step. The version is in `report`, and on the tokens.
- Its stock engines call their client on rank 0 alone, and a push is collective: with several ranks use `vllm_engine`.
- Its handles (`ipc_handles`) are Python tuples for a pickle. They are not sent: the bytes go by the plan's transport.
  Stock IPC therefore costs a copy of the weights in this process's memory.
- Stock NCCL broadcasts beside its client, into workers that have to come to its rendezvous: refused at `init`, before
  they would be waited for.
- Its start and finish have no ids: a second `start` begins anew, and drops what was handed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from controlplane.core.errors import InvalidRequest, UpdateAborted, WeightplaneError
from trainer_agent.adapters.handed_over import HandedOver, Watched
from trainer_agent.adapters.vllm_source import VllmWeightSource, whole_source
from trainer_agent.rank.report import PushReport
from trainer_agent.rank.spawn import RankPlace
from trainer_agent.rank.trainer_rank import JOIN_SECONDS, PUSH_SECONDS, TrainerRank
from trainer_agent.source import LayerwiseSource, WeightSource

WIRE_PARAMETERS = frozenset({"packed"})
"""Of vLLM's init infos: what says nothing about where bytes go."""


class WeightplaneSyncClient:
    """One trainer's push, in vLLM's four calls. Not for use by several threads."""

    def __init__(
        self,
        coordinator: str | None = None,
        *,
        model: str = "policy",
        run_id: str | None = None,
        label_is_step: bool = False,
        join_timeout: float = JOIN_SECONDS,
        push_timeout: float = PUSH_SECONDS,
    ) -> None:
        """As `TrainerRank.join`, which is called when the source is known."""
        self._joining: dict[str, Any] = {"model": model, "run_id": run_id}
        self._joining |= {"join_timeout": join_timeout, "push_timeout": push_timeout}
        self._coordinator = coordinator
        self._label_is_step = label_is_step
        self._rank: TrainerRank | None = None
        self._handed: HandedOver | None = None
        self._started = False
        self._broken = ""
        self.step = 0
        """Of the last push: the trainer's own count, which rides along with the version."""
        self.report: PushReport | None = None
        """Of the last push that the fleet committed."""

    # ---- for `vllm_engine` ----

    def join(self, source: WeightSource) -> TrainerRank:
        """Join the control plane with this source. Collective. Raises as `TrainerRank.join` does."""
        if self._rank is not None:
            raise InvalidRequest(field="client", problem="it has joined with a source; make one for each engine")
        self._rank = TrainerRank.join(self._coordinator, source=source, **self._joining)
        return self._rank

    def push(self, step: int | None = None) -> PushReport:
        """Push the source that was joined with. Collective. By default the step is one more than the last one.

        Raises:
            InvalidRequest: nothing was joined. Else as `TrainerRank.push` does.
        """
        if self._rank is None:
            raise InvalidRequest(field="client", problem="the engine is not initialised")
        self.step = self.step + 1 if step is None else step
        self.report = self._rank.push(self.step)
        return self.report

    def close(self) -> None:
        """Leave the control plane. Idempotent."""
        if self._rank is not None:
            self._rank.close()

    # ---- vLLM's protocol ----

    def watch(self, source: VllmWeightSource, *, ties: Sequence[tuple[str, str]] = ()) -> LayerwiseSource:
        """Say what updates consist of. The answer is for the engine that will call this client: what it takes from it
        is kept, and need not be in `update_info`.

        Raises:
            LayoutInvalid: as `whole_source`.
        """
        self._handed = HandedOver(whole_source(source, ties))
        return Watched(self._handed.stated, self._handed)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """The handshake: join with what is watched.

        Raises:
            InvalidRequest: `watch` was not called; the engine's bytes would travel beside the client; or there are
                several ranks, of which only this one would ever push. Else as `TrainerRank.join` does.
        """
        foreign = sorted(init_info.keys() - WIRE_PARAMETERS)
        if foreign:
            problem = f"{', '.join(foreign)}: bytes that travel beside the client reach no engine agent"
            raise InvalidRequest(field="init_info", problem=f'{problem}; use the trainer engine "weightplane"')
        if self._handed is None:
            raise InvalidRequest(field="client", problem="nothing is watched: call watch(source) first")
        place = RankPlace.detect()
        if place.world_size > 1:
            problem = f"{place.world_size} ranks push together, and vLLM's engines call their client on rank 0 only"
            raise InvalidRequest(field="client", problem=f'{problem}; use the trainer engine "weightplane"')
        self.join(self._handed)

    def start_weight_update(self) -> None:
        """Begin, or begin anew. Raises InvalidRequest before the handshake."""
        self._source().clear()
        self._started, self._broken = True, ""

    def update_weights(self, update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take tensors over: a copy of each is kept; the caller's memory is free on return (INV-12).

        Args:
            update_info: `names`, `dtype_names` and `shapes`, as of every engine of vLLM; and `tensors`, unless the
                source is watched. `ipc_handles` are not looked at.

        Raises:
            InvalidRequest: no update was started, or one payload per worker was given.
            LayoutInvalid: other tensors than the source states. The update can't be finished any more.
        """
        handed = self._source()
        self._require_started("update_weights")
        if not isinstance(update_info, Mapping):
            raise InvalidRequest(field="update_info", problem="payloads by worker rank: engine agents share one")
        try:
            handed.take(update_info)
        except WeightplaneError as error:
            self._broken = str(error)
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Push what was handed over; `report` says what came of it.

        Raises:
            InvalidRequest: no update was started; or a label (see above).
            UpdateAborted: an `update_weights` failed. LayoutInvalid: not everything was handed over; the update is
                still open. Else as `TrainerRank.push` does; the update is over then.
        """
        handed = self._source()
        self._require_started("finish_weight_update")
        if self._broken:
            raise UpdateAborted(update_id="of this client", cause=self._broken)
        step = self._step_of(weight_version)
        handed.require_whole()
        try:
            self.push(step)
        finally:
            self._started = False
            handed.clear()

    def shutdown_weight_transfer_engine(self) -> None:
        """As vLLM's own clients have it."""
        self.close()

    def _source(self) -> HandedOver:
        if self._handed is None or self._rank is None:
            raise InvalidRequest(field="client", problem="init_weight_transfer_engine was not called")
        return self._handed

    def _require_started(self, call: str) -> None:
        if not self._started:
            raise InvalidRequest(field=call, problem="no update was started")

    def _step_of(self, label: str | None) -> int | None:
        if label is None:
            return None
        if not self._label_is_step:
            problem = f"{label!r}: versions are given by the coordinator; leave it out, and read client.report.version"
            raise InvalidRequest(field="weight_version", problem=problem)
        if not label.isdecimal():
            raise InvalidRequest(field="weight_version", problem=f"{label!r} is no step: a decimal number")
        return int(label)

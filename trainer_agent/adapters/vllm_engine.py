"""A trainer engine for vLLM's own factory, under the name "weightplane": `send_weights` is a push with a version.

It has the shape of vLLM 0.32's stock ones (`IPCTrainerWeightTransferEngine`, `NCCLTrainerWeightTransferEngine`), takes
the same `WeightSource`, and is called on every rank as they are. What differs: every rank takes part in the push, so
`client` is a `WeightplaneSyncClient` on every rank; the source is iterated once a push, by the push itself; and
`report` says which version the fleet serves now. Engines are paused, updated and resumed by their agents: whoever
calls `send_weights` pauses nothing.

Import it where vLLM is installed; see `vllm_client` for an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from controlplane.core.errors import InvalidRequest
from trainer_agent.adapters.vllm_client import WeightplaneSyncClient
from trainer_agent.adapters.vllm_source import VllmWeightSource, whole_source
from trainer_agent.rank.report import PushReport
from trainer_agent.rank.spawn import RankPlace

BACKEND = "weightplane"


@dataclass
class WeightplaneTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM has no types for us
    """What vLLM's factory dispatches on."""

    backend: ClassVar[str] = BACKEND
    ties: Sequence[tuple[str, str]] = ()
    """(alias, source) pairs of names that share one tensor; only `source` is yielded. vLLM's sources cannot say it."""


class WeightplaneTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """See above. Made by the factory, or by `trainer_init`."""

    init_info_cls = WeightplaneTrainerInitInfo
    client: WeightplaneSyncClient

    @classmethod
    def trainer_init(
        cls,
        init_info: WeightplaneTrainerInitInfo,
        *,
        client: Any,
        source: VllmWeightSource | None = None,
    ) -> WeightplaneTrainerEngine:
        """Join the control plane. Collective.

        Raises:
            InvalidRequest: no source; another client, whose engines nobody would version; another rank than this is.
            LayoutInvalid: as `whole_source`. Else as `TrainerRank.join` does.
        """
        if source is None:
            raise InvalidRequest(field="source", problem="a push needs one")
        if not isinstance(client, WeightplaneSyncClient):
            problem = f"{type(client).__name__} reaches engines beside their agents; give a WeightplaneSyncClient"
            raise InvalidRequest(field="client", problem=problem)
        place = RankPlace.detect()
        if init_info.rank != place.rank:
            problem = f"this process is rank {place.rank} of {place.world_size}, not {init_info.rank}"
            raise InvalidRequest(field="rank", problem=problem)
        client.join(whole_source(source, init_info.ties))
        return cls(client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self, step: int | None = None) -> None:
        """Push; returns when the fleet decided. Collective. By default the step is one more than the last one.

        Raises:
            As `TrainerRank.push` does.
        """
        self.client.push(step)

    @property
    def report(self) -> PushReport | None:
        """Of the last push that the fleet committed."""
        return self.client.report

    def shutdown(self) -> None:
        """Leave the control plane."""
        self.client.close()


def register() -> None:
    """Make the factory know "weightplane". Idempotent."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, WeightplaneTrainerEngine)

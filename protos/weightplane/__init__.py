"""Weightplane's public names. They are imported on first use, so that the base install needs no torch.

>>> from weightplane import TrainerRank, MegatronSource, RolloutClient
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from controlplane.core.canary import CanaryReference
    from controlplane.core.pauses import PauseMode, PausePolicy
    from controlplane.core.sampling import SamplingSettings
    from controlplane.core.versions import WeightVersion
    from controlplane.rollout.ahead import RolloutsAhead
    from controlplane.rollout.blocking import BlockingRolloutClient
    from controlplane.rollout.client import RolloutClient
    from controlplane.rollout.lag_guard import LagGuard
    from controlplane.rollout.policies import BySession, LeastLoaded, PowerOfTwo
    from controlplane.rpc.security.settings import TlsSettings
    from trainer_agent.adapters.updater import WeightplaneUpdater
    from trainer_agent.adapters.vllm_client import WeightplaneSyncClient
    from trainer_agent.megatron.source import MegatronSource
    from trainer_agent.rank import TrainerRank
    from trainer_agent.sources.iterable import IterableSource
    from trainer_agent.sources.module import ModuleSource
    from trainer_agent.sources.with_draft import WithDraft

__all__ = [
    "BlockingRolloutClient",
    "BySession",
    "CanaryReference",
    "IterableSource",
    "LagGuard",
    "LeastLoaded",
    "MegatronSource",
    "ModuleSource",
    "PauseMode",
    "PausePolicy",
    "PowerOfTwo",
    "RolloutClient",
    "RolloutsAhead",
    "SamplingSettings",
    "TlsSettings",
    "TrainerRank",
    "WeightVersion",
    "WeightplaneSyncClient",
    "WeightplaneUpdater",
    "WithDraft",
]

_HOMES = {
    "CanaryReference": "controlplane.core.canary",
    "BlockingRolloutClient": "controlplane.rollout.blocking",
    "BySession": "controlplane.rollout.policies",
    "IterableSource": "trainer_agent.sources.iterable",
    "LeastLoaded": "controlplane.rollout.policies",
    "MegatronSource": "trainer_agent.megatron.source",
    "ModuleSource": "trainer_agent.sources.module",
    "PauseMode": "controlplane.core.pauses",
    "PausePolicy": "controlplane.core.pauses",
    "PowerOfTwo": "controlplane.rollout.policies",
    "RolloutClient": "controlplane.rollout.client",
    "RolloutsAhead": "controlplane.rollout.ahead",
    "SamplingSettings": "controlplane.core.sampling",
    "LagGuard": "controlplane.rollout.lag_guard",
    "TlsSettings": "controlplane.rpc.security.settings",
    "TrainerRank": "trainer_agent.rank",
    "WeightVersion": "controlplane.core.versions",
    "WeightplaneSyncClient": "trainer_agent.adapters.vllm_client",
    "WeightplaneUpdater": "trainer_agent.adapters.updater",
    "WithDraft": "trainer_agent.sources.with_draft",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightplane' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

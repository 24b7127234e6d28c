"""Weightplane's public names. They are imported on first use, so that the base install needs no torch.

>>> from weightplane import TrainerRank, MegatronSource, RolloutClient

Beside what is called, here is what comes of it (`PushReport`, `Sample`, `Span`), and the errors that a loop has reason
to tell apart; every other is a `WeightplaneError` with a `reason` too, in `controlplane.core.errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from controlplane.core.canary import CanaryReference
    from controlplane.core.errors import (
        CheckFailed,
        DeadlineExceeded,
        LeaseHeld,
        NoEngines,
        StaleTerm,
        UpdateFailed,
        VersionUnavailable,
        WeightplaneError,
    )
    from controlplane.core.pauses import PauseMode, PausePolicy
    from controlplane.core.sample_spans import Span
    from controlplane.core.sampling import SamplingSettings
    from controlplane.core.versions import WeightVersion
    from controlplane.rollout.ahead import RolloutsAhead
    from controlplane.rollout.blocking import BlockingRolloutClient
    from controlplane.rollout.client import RolloutClient
    from controlplane.rollout.lag_guard import Admitted, LagExceeded, LagGuard
    from controlplane.rollout.policies import BySession, LeastLoaded, PowerOfTwo
    from controlplane.rollout.sample import Delta, Sample, Scores
    from controlplane.rpc.security.settings import TlsSettings
    from trainer_agent.adapters.updater import WeightplaneUpdater
    from trainer_agent.adapters.vllm_client import WeightplaneSyncClient
    from trainer_agent.megatron.source import MegatronSource
    from trainer_agent.rank import TrainerRank
    from trainer_agent.rank.pending import PendingPush
    from trainer_agent.rank.report import PushReport
    from trainer_agent.sources.iterable import IterableSource
    from trainer_agent.sources.module import ModuleSource
    from trainer_agent.sources.with_draft import WithDraft

__all__ = [
    "Admitted",
    "BlockingRolloutClient",
    "BySession",
    "CanaryReference",
    "CheckFailed",
    "DeadlineExceeded",
    "Delta",
    "IterableSource",
    "LagExceeded",
    "LagGuard",
    "LeaseHeld",
    "LeastLoaded",
    "MegatronSource",
    "ModuleSource",
    "NoEngines",
    "PauseMode",
    "PausePolicy",
    "PendingPush",
    "PowerOfTwo",
    "PushReport",
    "RolloutClient",
    "RolloutsAhead",
    "Sample",
    "SamplingSettings",
    "Scores",
    "Span",
    "StaleTerm",
    "TlsSettings",
    "TrainerRank",
    "UpdateFailed",
    "VersionUnavailable",
    "WeightVersion",
    "WeightplaneError",
    "WeightplaneSyncClient",
    "WeightplaneUpdater",
    "WithDraft",
]

_HOMES = {
    "Admitted": "controlplane.rollout.lag_guard",
    "BlockingRolloutClient": "controlplane.rollout.blocking",
    "BySession": "controlplane.rollout.policies",
    "CanaryReference": "controlplane.core.canary",
    "CheckFailed": "controlplane.core.errors",
    "DeadlineExceeded": "controlplane.core.errors",
    "Delta": "controlplane.rollout.sample",
    "IterableSource": "trainer_agent.sources.iterable",
    "LagExceeded": "controlplane.rollout.lag_guard",
    "LagGuard": "controlplane.rollout.lag_guard",
    "LeaseHeld": "controlplane.core.errors",
    "LeastLoaded": "controlplane.rollout.policies",
    "MegatronSource": "trainer_agent.megatron.source",
    "ModuleSource": "trainer_agent.sources.module",
    "NoEngines": "controlplane.core.errors",
    "PauseMode": "controlplane.core.pauses",
    "PausePolicy": "controlplane.core.pauses",
    "PendingPush": "trainer_agent.rank.pending",
    "PowerOfTwo": "controlplane.rollout.policies",
    "PushReport": "trainer_agent.rank.report",
    "RolloutClient": "controlplane.rollout.client",
    "RolloutsAhead": "controlplane.rollout.ahead",
    "Sample": "controlplane.rollout.sample",
    "SamplingSettings": "controlplane.core.sampling",
    "Scores": "controlplane.rollout.sample",
    "Span": "controlplane.core.sample_spans",
    "StaleTerm": "controlplane.core.errors",
    "TlsSettings": "controlplane.rpc.security.settings",
    "TrainerRank": "trainer_agent.rank",
    "UpdateFailed": "controlplane.core.errors",
    "VersionUnavailable": "controlplane.core.errors",
    "WeightVersion": "controlplane.core.versions",
    "WeightplaneError": "controlplane.core.errors",
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

"""How often one caller may call: a token bucket for each caller and service. Pure.

Promises that a caller who calls too often is refused alone: others keep their own buckets; and bounded memory, whoever
calls. What carries heartbeats, weights and tokens is never counted, so no legitimate agent is slowed, however many
there are. Refuses nothing by itself where `calls_per_second` is 0.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from controlplane.core.errors import RateLimited

MAX_CALLERS = 4096
"""Buckets; beyond that the caller who was silent longest is forgotten, and begins with a full one."""

UNLIMITED = frozenset(
    {
        "/weightplane.v1.Fleet/Session",
        "/weightplane.v1.WeightUpdate/UpdateWeights",
        "/weightplane.v1.Rollout/Generate",
        "/weightplane.v1.Rollout/Score",
        "/weightplane.v1.Rollout/Abort",
        "/weightplane.local.v1.EngineMembers/Attach",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
    }
)
"""Sessions (a thousand engines of one host come at once after a coordinator's restart; heartbeats are frames in them),
weights, tokens (which have limits of their own), and probes. All other RPCs are counted, new ones too."""


@dataclass(frozen=True, slots=True)
class RateSettings:
    """The section `[rate]` of every daemon: how often one caller may make calls that steer or look.

    Raises:
        ValueError: numbers that mean nothing.
    """

    calls_per_second: float = 200.0
    """On the average. 0: as often as it likes."""
    burst: int = 2000
    """At once, after silence: a thousand clients of one host that come back together are not too many."""

    def __post_init__(self) -> None:
        if not 0 <= self.calls_per_second < float("inf"):
            raise ValueError("rate.calls_per_second is 0 or more")
        if self.burst < 1:
            raise ValueError("rate.burst is 1 or more")


DEFAULT_RATES = RateSettings()


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


@dataclass(slots=True)
class CallRates:
    """The buckets of one server."""

    settings: RateSettings = DEFAULT_RATES
    _buckets: OrderedDict[str, _Bucket] = field(default_factory=OrderedDict)

    def take(self, caller: str, now: float, method: str = "") -> None:
        """One call, at a monotonic time. Raises RateLimited, and then counts nothing.

        Each service of a caller has a bucket: who looks too often where nobody proves who it is stops no trainer there.
        """
        rate = self.settings.calls_per_second
        if not rate:
            return
        bucket = self._bucket(f"{caller} {method.rpartition('/')[0]}", now)
        bucket.level = min(self.settings.burst, bucket.level + max(0.0, now - bucket.at) * rate)
        bucket.at = max(bucket.at, now)
        if bucket.level < 1:
            raise RateLimited(caller=caller, calls_per_second=rate, retry_seconds=round((1 - bucket.level) / rate, 3))
        bucket.level -= 1

    def _bucket(self, key: str, now: float) -> _Bucket:
        found = self._buckets.setdefault(key, _Bucket(self.settings.burst, now))
        self._buckets.move_to_end(key)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        return found

"""What an engine's end of a call means to the request that was there."""

from __future__ import annotations

import time

import grpc

from controlplane.core import errors as e
from controlplane.core.sample_spans import VERSION_CHANGED, is_cut
from controlplane.core.versions import EngineId
from controlplane.rollout.choosing import Search
from controlplane.rollout.routing import Route
from controlplane.rpc.errors import RemoteError, from_rpc_error

ELSEWHERE_MAY_DO = (
    e.VersionUnavailable,
    e.EngineNotReady,
    e.EnginePoisoned,
    e.EngineDraining,
    e.EngineDied,
    e.LimitExceeded,
    e.WrongRun,
    e.WrongModel,
    e.PeerLost,
    e.VersionChanged,
    e.RequestAborted,
)


def engine_error(error: grpc.aio.AioRpcError, route: Route, search: Search) -> e.WeightplaneError:
    """The typed error that the engine raised; of gRPC's own, a broken connection is PeerLost."""
    typed = from_rpc_error(error)
    if not isinstance(typed, RemoteError):
        return typed
    if typed.code in ("UNAVAILABLE", "CANCELLED"):
        return e.PeerLost(peer=f"{route.engine_id} at {route.endpoint}", cause=typed.text)
    if typed.code == "DEADLINE_EXCEEDED":
        waited = round(time.monotonic() - search.started, 1)
        return e.DeadlineExceeded(phase="generate", waited_for=f"{route.engine_id} to finish", waited_seconds=waited)
    return typed


def nothing_came(
    engine_id: EngineId, request_id: str, finish_reason: str, stop_reason: str
) -> e.WeightplaneError | None:
    """An engine that ends a sample before its first token has lost nothing of it: another one may do it, unless its
    caller ended it."""
    if finish_reason == VERSION_CHANGED:
        return e.VersionChanged(request_id=request_id)
    if is_cut(finish_reason, stop_reason):
        return e.EngineNotReady(engine_id=engine_id, holds="it aborted the request before its first token")
    return None

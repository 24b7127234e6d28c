"""What an engine cannot do for a caller now."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.errors.tree import Refused


@dataclass(eq=False)
class InvalidRequest(Refused):
    reason = "INVALID_REQUEST"
    template = "{field}: {problem}"
    field: str
    problem: str


@dataclass(eq=False)
class EnginePoisoned(Refused):
    reason = "ENGINE_POISONED"
    template = "{engine_id} holds a mixture of weights ({cause}); a full update heals it"
    engine_id: str
    cause: str


@dataclass(eq=False)
class EngineNotReady(Refused):
    reason = "ENGINE_NOT_READY"
    template = "{engine_id} serves nothing now: {holds}"
    engine_id: str
    holds: str


@dataclass(eq=False)
class EngineAsleep(Refused):
    """P2: what the request needs is not in device memory."""

    reason = "ENGINE_ASLEEP"
    template = "{engine_id} is asleep: {missing} not resident; wake it first"
    engine_id: str
    missing: str


@dataclass(eq=False)
class EngineDraining(Refused):
    reason = "ENGINE_DRAINING"
    template = "{engine_id} is draining (asked by {owner}) and takes nothing new"
    engine_id: str
    owner: str


@dataclass(eq=False)
class UnsupportedByEngine(Refused):
    reason = "UNSUPPORTED_BY_ENGINE"
    template = "{engine_id} cannot do this: {what}"
    engine_id: str
    what: str


@dataclass(eq=False)
class VersionChanged(Refused):
    """Another version was installed while a request ran that is of one version or of none."""

    reason = "VERSION_CHANGED"
    template = "another version was installed while {request_id} ran"
    request_id: str


@dataclass(eq=False)
class RequestAborted(Refused):
    reason = "REQUEST_ABORTED"
    template = "{request_id} was aborted in the engine"
    request_id: str

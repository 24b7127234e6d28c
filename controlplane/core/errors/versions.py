"""Versions and updates that cannot be, or not now."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.errors.tree import Refused


@dataclass(eq=False)
class StaleVersion(Refused):
    reason = "STALE_VERSION"
    template = "{engine_id} has applied number {applied} in this incarnation; {got} is not above it"
    engine_id: str
    applied: int
    got: int


@dataclass(eq=False)
class VersionConflict(Refused):
    reason = "VERSION_CONFLICT"
    template = "version {version} was already applied with content {expected}; this update has {got}"
    version: str
    expected: str
    got: str


@dataclass(eq=False)
class BaseMismatch(Refused):
    """A delta for other weights than the engine holds (INV-5)."""

    reason = "BASE_MISMATCH"
    template = "{engine_id}: the delta is made for {expected}, the engine holds {got}"
    engine_id: str
    expected: str
    got: str


@dataclass(eq=False)
class UpdateInProgress(Refused):
    reason = "UPDATE_IN_PROGRESS"
    template = "update {update_id} (version {version}) is open here"
    update_id: str
    version: str


@dataclass(eq=False)
class UpdateAborted(Refused):
    reason = "UPDATE_ABORTED"
    template = "update {update_id} was aborted: {cause}"
    update_id: str
    cause: str


@dataclass(eq=False)
class NoEngines(Refused):
    reason = "NO_ENGINES"
    template = "no live, awake engine of model {model} could take an update ({known} known)"
    model: str
    known: int


@dataclass(eq=False)
class NotEnoughEngines(Refused):
    reason = "NOT_ENOUGH_ENGINES"
    template = "group {group} of model {model} has {live} live, awake engines; at least {needed} must take an update"
    model: str
    group: str
    live: int
    needed: int


@dataclass(eq=False)
class ModelFrozen(Refused):
    """The model is served as its engines loaded it: it has no trainer and takes no update."""

    reason = "MODEL_FROZEN"
    template = "model {model} is frozen: {problem}"
    model: str
    problem: str


@dataclass(eq=False)
class RequestRepeated(Refused):
    """The same request came again after its update was decided: no second number is given for it."""

    reason = "REQUEST_REPEATED"
    template = "request {request_id} was answered with update {update_id}, version {version}, which is decided"
    request_id: str
    update_id: str
    version: str


@dataclass(eq=False)
class RequestConflict(Refused):
    """The same request id with other contents."""

    reason = "REQUEST_CONFLICT"
    template = "request {request_id} came before with {field} {expected}, now with {got}"
    request_id: str
    field: str
    expected: str
    got: str


@dataclass(eq=False)
class VersionUnavailable(Refused):
    reason = "VERSION_UNAVAILABLE"
    template = "wanted version {wanted}, the engine applied {applied}"
    wanted: str
    applied: str

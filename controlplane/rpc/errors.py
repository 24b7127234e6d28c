"""Errors on the wire: one status and one reason for each class of `controlplane.core.errors`, both ways.

A servicer raises a typed error; the interceptor answers with google.rpc.Status and ErrorInfo. A
caller gets the same typed error back from `from_rpc_error`. An exception that is not ours becomes INTERNAL with an
id, and its text stays in the log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from controlplane.core import errors as e

DOMAIN = "weightplane"
"""ErrorInfo.domain of every error of ours."""

_C = grpc.StatusCode
STATUS: dict[type[e.WeightplaneError], grpc.StatusCode] = {
    e.LayoutInvalid: _C.INVALID_ARGUMENT,
    e.LayoutUnknown: _C.FAILED_PRECONDITION,
    e.ManifestIncomplete: _C.INVALID_ARGUMENT,
    e.UnknownTensor: _C.INVALID_ARGUMENT,
    e.ShapeMismatch: _C.INVALID_ARGUMENT,
    e.DtypeMismatch: _C.INVALID_ARGUMENT,
    e.FormatMismatch: _C.INVALID_ARGUMENT,
    e.Unauthenticated: _C.UNAUTHENTICATED,
    e.PermissionDenied: _C.PERMISSION_DENIED,
    e.IdentityMismatch: _C.PERMISSION_DENIED,
    e.RateLimited: _C.RESOURCE_EXHAUSTED,
    e.WrongRun: _C.FAILED_PRECONDITION,
    e.WrongModel: _C.FAILED_PRECONDITION,
    e.WrongIncarnation: _C.FAILED_PRECONDITION,
    e.UnknownEngine: _C.NOT_FOUND,
    e.UnknownUpdate: _C.NOT_FOUND,
    e.IncompatibleNode: _C.FAILED_PRECONDITION,
    e.StaleTerm: _C.FAILED_PRECONDITION,
    e.StaleTurn: _C.FAILED_PRECONDITION,
    e.LeaseHeld: _C.ABORTED,
    e.NotWelcomed: _C.UNAVAILABLE,
    e.CoordinatorRecovering: _C.UNAVAILABLE,
    e.LedgerRegressed: _C.UNAVAILABLE,
    e.DevicesTaken: _C.FAILED_PRECONDITION,
    e.StaleVersion: _C.FAILED_PRECONDITION,
    e.VersionConflict: _C.ALREADY_EXISTS,
    e.BaseMismatch: _C.FAILED_PRECONDITION,
    e.UpdateInProgress: _C.ABORTED,
    e.UpdateAborted: _C.ABORTED,
    e.NoEngines: _C.FAILED_PRECONDITION,
    e.NotEnoughEngines: _C.FAILED_PRECONDITION,
    e.ModelFrozen: _C.FAILED_PRECONDITION,
    e.RequestRepeated: _C.ALREADY_EXISTS,
    e.RequestConflict: _C.INVALID_ARGUMENT,
    e.VersionUnavailable: _C.FAILED_PRECONDITION,
    e.CanaryDisagrees: _C.INTERNAL,
    e.VersionChanged: _C.ABORTED,
    e.RequestAborted: _C.ABORTED,
    e.ScoreIncomplete: _C.INTERNAL,
    e.FrameInvalid: _C.INVALID_ARGUMENT,
    e.FrameOutOfOrder: _C.FAILED_PRECONDITION,
    e.LimitExceeded: _C.RESOURCE_EXHAUSTED,
    e.ChecksumMismatch: _C.DATA_LOSS,
    e.ByteCountMismatch: _C.DATA_LOSS,
    e.SegmentUnreadable: _C.FAILED_PRECONDITION,
    e.CheckpointUnreadable: _C.FAILED_PRECONDITION,
    e.CheckpointUnknown: _C.NOT_FOUND,
    e.CheckpointInUse: _C.FAILED_PRECONDITION,
    e.SlotMismatch: _C.FAILED_PRECONDITION,
    e.EngineMisfit: _C.FAILED_PRECONDITION,
    e.DeviceHandlesMissing: _C.FAILED_PRECONDITION,
    e.InvalidRequest: _C.INVALID_ARGUMENT,
    e.EnginePoisoned: _C.UNAVAILABLE,
    e.EngineNotReady: _C.UNAVAILABLE,
    e.EngineAsleep: _C.FAILED_PRECONDITION,
    e.EngineDraining: _C.UNAVAILABLE,
    e.UnsupportedByEngine: _C.UNIMPLEMENTED,
    e.InstallFailed: _C.INTERNAL,
    e.InstallTimedOut: _C.INTERNAL,
    e.CanaryFailed: _C.INTERNAL,
    e.SpanMismatch: _C.INTERNAL,
    e.EngineDied: _C.UNAVAILABLE,
    e.UpdateFailed: _C.ABORTED,
    e.CheckFailed: _C.FAILED_PRECONDITION,
    e.DeadlineExceeded: _C.DEADLINE_EXCEEDED,
    e.PeerLost: _C.UNAVAILABLE,
    e.TlsFailed: _C.UNAVAILABLE,
    e.LinkFailed: _C.UNAVAILABLE,
    e.IpcNotPossible: _C.FAILED_PRECONDITION,
    e.LedgerError: _C.INTERNAL,
}


@dataclass(eq=False)
class RemoteError(e.Failed):
    """An error of the peer or of gRPC itself that is none of the tree's, such as a broken connection."""

    reason = "REMOTE"
    template = "{code}: {text}"
    code: str
    text: str


def to_status(error: e.WeightplaneError) -> grpc.Status:
    """The google.rpc.Status of a typed error, as grpc's abort_with_status takes it: with ErrorInfo, and RetryInfo where
    the caller is told when to come again."""
    code = STATUS[type(error)]
    values = {name: e.cut(value) for name, value in error.metadata().items()}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=values)]
    if isinstance(error, e.RateLimited):
        delay = Duration()
        delay.FromMilliseconds(math.ceil(error.retry_seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [any_pb2.Any() for _ in details]
    for detail, message in zip(packed, details, strict=True):
        detail.Pack(message)
    status: grpc.Status = rpc_status.to_status(
        status_pb2.Status(code=code_pb2.Code.Value(code.name), message=e.cut(str(error)), details=packed)
    )
    return status


LOST_STATUS = "Internal error from Core"
"""What grpcio says in place of the peer's status when that status meets a write on its way (grpc/grpc#36066)."""


def from_rpc_error(error: grpc.aio.AioRpcError) -> e.WeightplaneError:
    """The typed error that the peer raised; RemoteError for anything else.

    A status that was lost on its way is a broken connection: UNAVAILABLE, so that the next try hears the true one.
    """
    try:
        info = _error_info(error)
        typed = e.rebuild(info.reason, info.metadata) if info is not None else None
    except (ValueError, DecodeError):
        # Details that are not what they should be; or the peer's status met our own deadline, and the code is ours.
        typed = None
    lost = error.code() is grpc.StatusCode.INTERNAL and error.details() == LOST_STATUS
    code = grpc.StatusCode.UNAVAILABLE if lost else error.code()
    return typed or RemoteError(code=code.name, text=error.details() or "")


def _error_info(error: Any) -> error_details_pb2.ErrorInfo | None:
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None

"""Every error that a caller can meet, as one tree.

    WeightplaneError
    ├── Refused            bad or untimely input: nothing was touched, nothing is lost
    │   ├── layout         LayoutInvalid, LayoutUnknown, ManifestIncomplete, UnknownTensor, ShapeMismatch,
    │   │                  DtypeMismatch, FormatMismatch
    │   ├── identity       WrongRun, WrongModel, WrongIncarnation, UnknownEngine, UnknownUpdate, IncompatibleNode
    │   ├── access         Unauthenticated, PermissionDenied, IdentityMismatch
    │   ├── fencing        StaleTerm, StaleTurn, LeaseHeld, NotWelcomed, CoordinatorRecovering, LedgerRegressed,
    │   │                  DevicesTaken
    │   ├── version        StaleVersion, VersionConflict, BaseMismatch, UpdateInProgress, UpdateAborted, NoEngines,
    │   │                  NotEnoughEngines, VersionUnavailable, ModelFrozen, RequestRepeated, RequestConflict
    │   ├── frames         FrameInvalid, FrameOutOfOrder, LimitExceeded
    │   ├── data           ChecksumMismatch, ByteCountMismatch, SegmentUnreadable, CheckpointUnreadable,
    │   │                  CheckpointUnknown, CheckpointInUse
    │   ├── slots          SlotMismatch, EngineMisfit, DeviceHandlesMissing
    │   └── requests       InvalidRequest, EnginePoisoned, EngineNotReady, EngineAsleep, EngineDraining,
    │                      UnsupportedByEngine
    └── Failed             something was tried and did not work; the text says what is true now
        ├── InstallFailed, InstallTimedOut, CanaryFailed, CanaryDisagrees, SpanMismatch, ScoreIncomplete, EngineDied
        └── UpdateFailed, CheckFailed, DeadlineExceeded, PeerLost, TlsFailed, LinkFailed, IpcNotPossible, LedgerError

Each class has one `reason` (ErrorInfo.reason on the wire) and its ids and numbers as attributes,
which are also its metadata. `controlplane.rpc.errors` maps each class to one gRPC status; a test
checks that the table is complete.
"""

from __future__ import annotations

from controlplane.core.errors.access import IdentityMismatch, PermissionDenied, RateLimited, Unauthenticated
from controlplane.core.errors.failures import (
    CanaryDisagrees,
    CanaryFailed,
    CheckFailed,
    DeadlineExceeded,
    EngineDied,
    InstallFailed,
    InstallTimedOut,
    IpcNotPossible,
    LedgerError,
    LinkFailed,
    PeerLost,
    ScoreIncomplete,
    SpanMismatch,
    TlsFailed,
    UpdateFailed,
)
from controlplane.core.errors.fencing import (
    CoordinatorRecovering,
    DevicesTaken,
    LeaseHeld,
    LedgerRegressed,
    NotWelcomed,
    StaleTerm,
    StaleTurn,
)
from controlplane.core.errors.identity import (
    IncompatibleNode,
    UnknownEngine,
    UnknownUpdate,
    WrongIncarnation,
    WrongModel,
    WrongRun,
)
from controlplane.core.errors.layouts import (
    DtypeMismatch,
    FormatMismatch,
    LayoutInvalid,
    LayoutUnknown,
    ManifestIncomplete,
    ShapeMismatch,
    UnknownTensor,
)
from controlplane.core.errors.rebuilding import error_classes, rebuild
from controlplane.core.errors.requests import (
    EngineAsleep,
    EngineDraining,
    EngineNotReady,
    EnginePoisoned,
    InvalidRequest,
    RequestAborted,
    UnsupportedByEngine,
    VersionChanged,
)
from controlplane.core.errors.shown import cut, some
from controlplane.core.errors.transfer import (
    ByteCountMismatch,
    CheckpointInUse,
    CheckpointUnknown,
    CheckpointUnreadable,
    ChecksumMismatch,
    DeviceHandlesMissing,
    EngineMisfit,
    FrameInvalid,
    FrameOutOfOrder,
    LimitExceeded,
    SegmentUnreadable,
    SlotMismatch,
)
from controlplane.core.errors.tree import PUBLIC, Failed, Refused, WeightplaneError
from controlplane.core.errors.versions import (
    BaseMismatch,
    ModelFrozen,
    NoEngines,
    NotEnoughEngines,
    RequestConflict,
    RequestRepeated,
    StaleVersion,
    UpdateAborted,
    UpdateInProgress,
    VersionConflict,
    VersionUnavailable,
)

__all__ = [
    "BaseMismatch",
    "ByteCountMismatch",
    "CanaryDisagrees",
    "CanaryFailed",
    "CheckFailed",
    "CheckpointInUse",
    "CheckpointUnknown",
    "CheckpointUnreadable",
    "ChecksumMismatch",
    "CoordinatorRecovering",
    "DeadlineExceeded",
    "DeviceHandlesMissing",
    "DevicesTaken",
    "DtypeMismatch",
    "EngineAsleep",
    "EngineDied",
    "EngineDraining",
    "EngineMisfit",
    "EngineNotReady",
    "EnginePoisoned",
    "Failed",
    "FormatMismatch",
    "FrameInvalid",
    "FrameOutOfOrder",
    "IdentityMismatch",
    "IncompatibleNode",
    "InstallFailed",
    "InstallTimedOut",
    "InvalidRequest",
    "IpcNotPossible",
    "LayoutInvalid",
    "LayoutUnknown",
    "LeaseHeld",
    "LedgerError",
    "LedgerRegressed",
    "LimitExceeded",
    "LinkFailed",
    "ManifestIncomplete",
    "ModelFrozen",
    "NoEngines",
    "NotEnoughEngines",
    "NotWelcomed",
    "PeerLost",
    "PermissionDenied",
    "RateLimited",
    "Refused",
    "RequestAborted",
    "RequestConflict",
    "RequestRepeated",
    "ScoreIncomplete",
    "SegmentUnreadable",
    "ShapeMismatch",
    "SlotMismatch",
    "SpanMismatch",
    "StaleTerm",
    "StaleTurn",
    "StaleVersion",
    "TlsFailed",
    "Unauthenticated",
    "UnknownEngine",
    "UnknownTensor",
    "UnknownUpdate",
    "UnsupportedByEngine",
    "UpdateAborted",
    "UpdateFailed",
    "UpdateInProgress",
    "VersionChanged",
    "VersionConflict",
    "VersionUnavailable",
    "WeightplaneError",
    "WrongIncarnation",
    "WrongModel",
    "WrongRun",
    "cut",
    "error_classes",
    "rebuild",
    "some",
]

for _class in (WeightplaneError, Refused, Failed, *error_classes()):
    _class.__module__ = PUBLIC

"""Every error that a caller can meet, as one tree.

    WeightplaneError
    ├── Refused            bad or untimely input: nothing was touched, nothing is lost
    │   ├── layout         LayoutInvalid, LayoutUnknown, ManifestIncomplete, UnknownTensor, ShapeMismatch,
    │   │                  DtypeMismatch, FormatMismatch
    │   ├── access         Unauthenticated, PermissionDenied, IdentityMismatch
    │   ├── identity       WrongRun, WrongModel, WrongIncarnation, UnknownEngine, UnknownUpdate, IncompatibleNode
    │   ├── fencing        StaleTerm, LeaseHeld, NotWelcomed, CoordinatorRecovering, LedgerRegressed, DevicesTaken
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

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

NAMES_SHOWN = 5
"""Names listed in a message; `metadata()` gives the whole count."""


@dataclass(eq=False)
class WeightplaneError(Exception):
    """The root. Subclasses set `reason` and `template`; their fields fill the template."""

    reason: ClassVar[str] = ""
    template: ClassVar[str] = ""

    def __post_init__(self) -> None:
        super().__init__(str(self))

    def __str__(self) -> str:
        return self.template.format(**{f.name: _shown(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def metadata(self) -> dict[str, str]:
        """The attributes as text, for ErrorInfo. Long lists are cut, with a count beside them."""
        out: dict[str, str] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            out[f.name] = _shown(value)
            if isinstance(value, list):
                out[f"{f.name}_count"] = str(len(value))
        return out


class Refused(WeightplaneError):
    """Refused before anything was touched."""


class Failed(WeightplaneError):
    """Tried, and did not work."""


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, (list, frozenset, set)):
        items = sorted(value) if not isinstance(value, list) else value
        more = f" and {len(items) - NAMES_SHOWN} more" if len(items) > NAMES_SHOWN else ""
        return ", ".join(str(v) for v in items[:NAMES_SHOWN]) + more
    return str(value)


# ---- layout -------------------------------------------------------------------------------------


@dataclass(eq=False)
class LayoutInvalid(Refused):
    reason = "LAYOUT_INVALID"
    template = "{problem}: {names}"
    problem: str
    names: list[str]


@dataclass(eq=False)
class LayoutUnknown(Refused):
    reason = "LAYOUT_UNKNOWN"
    template = "no layout with digest {digest} was sent to this engine incarnation"
    digest: str


@dataclass(eq=False)
class ManifestIncomplete(Refused):
    reason = "MANIFEST_INCOMPLETE"
    template = "the layout covers {got} of the engine's {expected} tensors; missing: {names}"
    names: list[str]
    expected: int
    got: int


@dataclass(eq=False)
class UnknownTensor(Refused):
    reason = "UNKNOWN_TENSOR"
    template = "the engine's model has no tensor of these names: {names}"
    names: list[str]


@dataclass(eq=False)
class ShapeMismatch(Refused):
    reason = "SHAPE_MISMATCH"
    template = "{name}: the engine expects shape {expected}, got {got}"
    name: str
    expected: tuple[int, ...]
    got: tuple[int, ...]


@dataclass(eq=False)
class DtypeMismatch(Refused):
    reason = "DTYPE_MISMATCH"
    template = "{name}: the engine accepts {expected}, got {got}"
    name: str
    expected: str
    got: str


@dataclass(eq=False)
class FormatMismatch(Refused):
    reason = "FORMAT_MISMATCH"
    template = "the engine's weights are in format {expected}, the layout is in {got}"
    expected: str
    got: str


# ---- access -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Unauthenticated(Refused):
    """The caller did not prove who it is. The cause never quotes what it showed."""

    reason = "UNAUTHENTICATED"
    template = "who calls is not known: {cause}"
    cause: str


@dataclass(eq=False)
class PermissionDenied(Refused):
    """The caller is known, and may not call this."""

    reason = "PERMISSION_DENIED"
    template = "{method} is not for {caller}: it wants {wanted}, the caller has {had}"
    method: str
    caller: str
    wanted: str
    had: str


@dataclass(eq=False)
class IdentityMismatch(Refused):
    """The caller may call this, but not in that name."""

    reason = "IDENTITY_MISMATCH"
    template = "{caller} may not speak as {claimed}"
    caller: str
    claimed: str


# ---- identity -----------------------------------------------------------------------------------


@dataclass(eq=False)
class WrongRun(Refused):
    reason = "WRONG_RUN"
    template = "this is run {expected}, the call is for run {got}"
    expected: str
    got: str


@dataclass(eq=False)
class WrongModel(Refused):
    reason = "WRONG_MODEL"
    template = "this engine serves model {expected}, the call is for {got}"
    expected: str
    got: str


@dataclass(eq=False)
class WrongIncarnation(Refused):
    reason = "WRONG_INCARNATION"
    template = "{engine_id} lives as incarnation {expected}, the call is for {got}"
    engine_id: str
    expected: str
    got: str


@dataclass(eq=False)
class UnknownEngine(Refused):
    reason = "UNKNOWN_ENGINE"
    template = "no such engine here: {engine_id}"
    engine_id: str


@dataclass(eq=False)
class UnknownUpdate(Refused):
    reason = "UNKNOWN_UPDATE"
    template = "no update {update_id} is known here"
    update_id: str


@dataclass(eq=False)
class IncompatibleNode(Refused):
    """A hello that names a protocol or settings that cannot work together with this coordinator."""

    reason = "INCOMPATIBLE_NODE"
    template = "{what}: expected {expected}, got {got}"
    what: str
    expected: str
    got: str


# ---- fencing ------------------------------------------------------------------------------------


@dataclass(eq=False)
class StaleTerm(Refused):
    """The writer was fenced: a later term was given. It must end (exit code FENCED), never retry (INV-7)."""

    reason = "STALE_TERM"
    template = "term {got} of {model} is fenced: the present term is {current}"
    model: str
    got: int
    current: int


@dataclass(eq=False)
class LeaseHeld(Refused):
    reason = "LEASE_HELD"
    template = (
        "trainer {holder} (incarnation {incarnation}) holds term {term} of {model} for {remaining_seconds} s more; "
        "wait, or start with --takeover"
    )
    model: str
    holder: str
    incarnation: str
    term: int
    remaining_seconds: float


@dataclass(eq=False)
class NotWelcomed(Refused):
    """INV-7: before the coordinator's welcome the agent does not know the terms, so it takes no update."""

    reason = "NOT_WELCOMED"
    template = "{engine_id} has not been welcomed by a coordinator yet"
    engine_id: str


@dataclass(eq=False)
class CoordinatorRecovering(Refused):
    reason = "COORDINATOR_RECOVERING"
    template = "the coordinator (term {term}) restarted and still waits for reports of: {engines}"
    term: int
    engines: list[str]


@dataclass(eq=False)
class LedgerRegressed(Refused):
    """Agents know numbers or terms that this ledger never gave: it is an older copy. A person must accept it."""

    reason = "LEDGER_REGRESSED"
    template = (
        "the ledger knows {what} {known}, and {who} has seen {seen}: it is an older copy; "
        "put the newer one back, or accept this one (weightplane ledger accept)"
    )
    what: str
    known: int
    seen: int
    who: str


@dataclass(eq=False)
class DevicesTaken(Refused):
    """Only who put an engine to sleep wakes it: its devices are in use."""

    reason = "DEVICES_TAKEN"
    template = "{engine_id} was put to sleep by {owner}, who holds its devices"
    engine_id: str
    owner: str


# ---- versions and updates -----------------------------------------------------------------------


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


@dataclass(eq=False)
class ScoreIncomplete(Failed):
    """A missing log probability is an error, and never a number."""

    reason = "SCORE_INCOMPLETE"
    template = "the engine gave {got} of {expected} log probabilities for {request_id}"
    request_id: str
    expected: int
    got: int


# ---- frames -------------------------------------------------------------------------------------


@dataclass(eq=False)
class FrameInvalid(Refused):
    """A message broke a rule that its proto declares."""

    reason = "INVALID_MESSAGE"
    template = "{message}.{field}: {problem}"
    message: str
    field: str
    problem: str


@dataclass(eq=False)
class FrameOutOfOrder(Refused):
    reason = "FRAME_OUT_OF_ORDER"
    template = "expected {expected}, got {got}"
    expected: str
    got: str


@dataclass(eq=False)
class LimitExceeded(Refused):
    reason = "LIMIT_EXCEEDED"
    template = "{what}: the limit is {limit}, asked for {got}"
    what: str
    limit: int
    got: int


# ---- data ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class ChecksumMismatch(Refused):
    reason = "CHECKSUM_MISMATCH"
    template = "{name}: the bytes received have checksum {got}, the sender stated {expected}"
    name: str
    expected: str
    got: str


@dataclass(eq=False)
class ByteCountMismatch(Refused):
    reason = "BYTE_COUNT_MISMATCH"
    template = "{what}: expected {expected}, got {got}"
    what: str
    expected: int
    got: int


@dataclass(eq=False)
class SegmentUnreadable(Refused):
    reason = "SEGMENT_UNREADABLE"
    template = "shared-memory segment {segment} cannot be read here: {cause}"
    segment: str
    cause: str


@dataclass(eq=False)
class CheckpointUnreadable(Refused):
    reason = "CHECKPOINT_UNREADABLE"
    template = "checkpoint {name} cannot be read here: {cause}"
    name: str
    cause: str


@dataclass(eq=False)
class CheckpointUnknown(Refused):
    reason = "CHECKPOINT_UNKNOWN"
    template = "no checkpoint of number {number} of model {model} is known here"
    model: str
    number: int


@dataclass(eq=False)
class CheckpointInUse(Refused):
    reason = "CHECKPOINT_IN_USE"
    template = "the checkpoint of number {number} of model {model} stays: {engines} stay at that version"
    model: str
    number: int
    engines: list[str]


# ---- slots --------------------------------------------------------------------------------------


@dataclass(eq=False)
class SlotMismatch(Refused):
    reason = "SLOT_MISMATCH"
    template = "the ranks of engine {engine_id}'s slot disagree on {what}: {ranks}"
    engine_id: str
    what: str
    ranks: str


@dataclass(eq=False)
class EngineMisfit(Refused):
    """Some of an engine's devices belong to trainer ranks, but not all: no slot can feed it."""

    reason = "ENGINE_MISFIT"
    template = "{engine_id}: {held} of its {total} devices are held by trainer ranks; missing: {missing}"
    engine_id: str
    held: int
    total: int
    missing: list[str]


@dataclass(eq=False)
class DeviceHandlesMissing(Refused):
    reason = "DEVICE_HANDLES_MISSING"
    template = "no buffer for these devices of {engine_id}: {missing}"
    engine_id: str
    missing: list[str]


# ---- generation requests ------------------------------------------------------------------------


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


# ---- failures -----------------------------------------------------------------------------------


@dataclass(eq=False)
class InstallFailed(Failed):
    """`touched` says whether a byte had been installed: if so the engine is poisoned, else the old version serves."""

    reason = "INSTALL_FAILED"
    template = "{engine_id}: install of {version} failed (weights touched: {touched}): {cause}"
    engine_id: str
    version: str
    touched: bool
    cause: str


@dataclass(eq=False)
class InstallTimedOut(Failed):
    reason = "INSTALL_TIMED_OUT"
    template = "{engine_id}: install of {version} did not end within {limit_seconds} s; the engine core is rebuilt"
    engine_id: str
    version: str
    limit_seconds: float


@dataclass(eq=False)
class CanaryFailed(Failed):
    reason = "CANARY_FAILED"
    template = "{engine_id}: the canary after the install of {version} failed: {cause}"
    engine_id: str
    version: str
    cause: str


@dataclass(eq=False)
class CanaryDisagrees(Failed):
    """It holds the bytes that others hold, and says something else: something in it is not what it should be."""

    reason = "CANARY_DISAGREES"
    template = "{engine_id}: after the install of {version} {cause}"
    engine_id: str
    version: str
    cause: str


@dataclass(eq=False)
class SpanMismatch(Failed):
    """INV-11: our spans and the engine's own disagree."""

    reason = "SPAN_MISMATCH"
    template = "request {request_id}: our spans are {ours}, the engine's are {engines}"
    request_id: str
    ours: str
    engines: str


@dataclass(eq=False)
class EngineDied(Failed):
    reason = "ENGINE_DIED"
    template = "{engine_id}: the engine's processes are gone: {cause}"
    engine_id: str
    cause: str


@dataclass(eq=False)
class UpdateFailed(Failed):
    """The fleet did not commit. `outcomes` names each engine's."""

    reason = "UPDATE_FAILED"
    template = "update {update_id} (version {version}) was not committed: {cause}; engines: {outcomes}"
    update_id: str
    version: str
    cause: str
    outcomes: str


@dataclass(eq=False)
class CheckFailed(Failed):
    """A push was committed, and engines that reported to have applied it do not hold it now."""

    reason = "CHECK_FAILED"
    template = "version {version} was committed, and {found} of {asked} engines do not hold it now: {differences}"
    version: str
    found: int
    asked: int
    differences: str


@dataclass(eq=False)
class DeadlineExceeded(Failed):
    reason = "DEADLINE_EXCEEDED"
    template = "{phase}: waited {waited_seconds} s for {waited_for}"
    phase: str
    waited_for: str
    waited_seconds: float

    stacks = ""
    """What those who were waited for were doing, where somebody looked. No metadata: it does not go over gRPC."""


@dataclass(eq=False)
class PeerLost(Failed):
    reason = "PEER_LOST"
    template = "{peer} went away: {cause}"
    peer: str
    cause: str


@dataclass(eq=False)
class TlsFailed(Failed):
    """No connection comes about, and a look at the peer's port and at our own files said why."""

    reason = "TLS_FAILED"
    template = "no secure connection with {peer}: {cause}"
    peer: str
    cause: str


@dataclass(eq=False)
class LinkFailed(Failed):
    """`engine_id` names all of the link's engines that it is about. `stage`: `connect` (the engine does not reach the
    sender), `probe` (other bytes came than were sent), `join` (not everybody came), `bytes` (it broke later)."""

    reason = "LINK_FAILED"
    template = "the {transport} link to {engine_id} failed ({stage}): {cause}"
    engine_id: str
    transport: str
    stage: str
    cause: str


@dataclass(eq=False)
class IpcNotPossible(Failed):
    reason = "IPC_NOT_POSSIBLE"
    template = "{engine_id} cannot open memory of device {device_uuid}: {cause}"
    engine_id: str
    device_uuid: str
    cause: str


@dataclass(eq=False)
class LedgerError(Failed):
    reason = "LEDGER_ERROR"
    template = "ledger {path}: {cause}"
    path: str
    cause: str


def error_classes(root: type[WeightplaneError] = WeightplaneError) -> Sequence[type[WeightplaneError]]:
    """Every concrete class of the tree (those with a reason), for the table and its test."""
    found: list[type[WeightplaneError]] = []
    for cls in root.__subclasses__():
        found.extend([cls] if cls.reason else [])
        found.extend(error_classes(cls))
    return found


def rebuild(reason: str, metadata: Mapping[str, str]) -> WeightplaneError | None:
    """The error that `metadata()` described, attributes and all; None if the tree has no such reason."""
    of_the_tree = (c for c in error_classes() if c.__module__ == __name__)
    cls = next((c for c in of_the_tree if c.reason == reason), None)
    if cls is None:
        return None
    return cls(**{f.name: _parsed(str(f.type), metadata.get(f.name, "")) for f in dataclasses.fields(cls)})


def _parsed(kind: str, text: str) -> object:
    if kind == "int":
        return int(text or "0")
    if kind == "float":
        return float(text or "0")
    if kind == "bool":
        return text == "True"
    if kind.startswith("list"):
        return [t for t in text.split(", ") if t]
    if kind.startswith("tuple"):
        return tuple(int(t) for t in text.strip("()").split(",") if t.strip())
    return text

"""What was tried and did not work."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.errors.tree import Failed


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


@dataclass(eq=False)
class ScoreIncomplete(Failed):
    """A missing log probability is an error, and never a number."""

    reason = "SCORE_INCOMPLETE"
    template = "the engine gave {got} of {expected} log probabilities for {request_id}"
    request_id: str
    expected: int
    got: int

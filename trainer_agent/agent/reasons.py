"""What a refusal means to a trainer: the same would be met again, or it passes, and how. Pure.

Promises: every reason of `controlplane.core.errors` stands in exactly one of PERMANENT and PASSING; a test walks the
tree. Where nothing is said a refusal is an end, with its own words: a trainer that waits for what never comes is worse.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from controlplane.core.errors import (
    DeadlineExceeded,
    IpcNotPossible,
    LinkFailed,
    PeerLost,
    StaleTerm,
    UpdateFailed,
    WeightplaneError,
)
from controlplane.rpc.errors import RemoteError

TRANSIENT_CODES = frozenset({"UNAVAILABLE", "CANCELLED"})
"""How a coordinator that stops, restarts or is cut off looks to its clients."""

PERMANENT = frozenset(
    {
        "LAYOUT_INVALID",
        "MANIFEST_INCOMPLETE",
        "UNKNOWN_TENSOR",
        "SHAPE_MISMATCH",
        "DTYPE_MISMATCH",
        "FORMAT_MISMATCH",
        "WRONG_RUN",
        "WRONG_MODEL",
        "INCOMPATIBLE_NODE",
        "INVALID_MESSAGE",
        "FRAME_OUT_OF_ORDER",
        "LIMIT_EXCEEDED",
        "SEGMENT_UNREADABLE",
        "DEVICE_HANDLES_MISSING",
        "SLOT_MISMATCH",
        "ENGINE_MISFIT",
        "MODEL_FROZEN",
        "UNSUPPORTED_BY_ENGINE",
        "STALE_TERM",
        "PERMISSION_DENIED",
        "IDENTITY_MISMATCH",
    }
)
"""The next attempt, whole and with a new number, would meet these again."""

PASSING = frozenset(
    {
        # The next attempt is planned anew: without engines that sleep, drain or are gone, with those that came.
        "WRONG_INCARNATION",
        "UNKNOWN_ENGINE",
        "NOT_WELCOMED",
        "ENGINE_NOT_READY",
        "ENGINE_ASLEEP",
        "ENGINE_DRAINING",
        "ENGINE_DIED",
        "DEVICES_TAKEN",
        "STALE_TURN",
        "NO_ENGINES",
        "NOT_ENOUGH_ENGINES",
        # It is whole, and has a higher number.
        "LAYOUT_UNKNOWN",
        "STALE_VERSION",
        "VERSION_CONFLICT",
        "BASE_MISMATCH",
        "ENGINE_POISONED",
        "REQUEST_REPEATED",
        "REQUEST_CONFLICT",
        # It goes another way.
        "LINK_FAILED",
        "IPC_NOT_POSSIBLE",
        # It finds another moment.
        "UPDATE_IN_PROGRESS",
        "UPDATE_ABORTED",
        "UPDATE_FAILED",
        "CHECK_FAILED",
        "UNKNOWN_UPDATE",
        "LEASE_HELD",
        "COORDINATOR_RECOVERING",
        "LEDGER_REGRESSED",
        "LEDGER_ERROR",
        "DEADLINE_EXCEEDED",
        "PEER_LOST",
        "UNAUTHENTICATED",
        "TLS_FAILED",
        "RATE_LIMITED",
        "CHECKSUM_MISMATCH",
        "BYTE_COUNT_MISMATCH",
        "INSTALL_FAILED",
        "INSTALL_TIMED_OUT",
        "CANARY_FAILED",
        "CANARY_DISAGREES",
        # No push is answered with these: of generation, and of what the coordinator brings by itself.
        "INVALID_REQUEST",
        "VERSION_UNAVAILABLE",
        "SPAN_MISMATCH",
        "VERSION_CHANGED",
        "REQUEST_ABORTED",
        "SCORE_INCOMPLETE",
        "CHECKPOINT_UNREADABLE",
        "CHECKPOINT_UNKNOWN",
        "CHECKPOINT_IN_USE",
    }
)
"""The next attempt may do."""

_PERSON = frozenset({"LEDGER_REGRESSED", "UNAUTHENTICATED", "TLS_FAILED"})
"""Until a person acted: a certificate or a token that ran out in mid-training must not end the training."""
_COMES_BACK = _PERSON | {"RATE_LIMITED", "COORDINATOR_RECOVERING", "LEDGER_ERROR", "PEER_LOST"}
"""Said by a coordinator that will answer otherwise after a while: by itself, or once a person acted."""
HELLO_WAITS = _COMES_BACK | {"LEASE_HELD", "DEADLINE_EXCEEDED"}
"""The session is tried again."""
BEGIN_WAITS = _COMES_BACK | {"UPDATE_IN_PROGRESS"}
"""The same request is made again."""
_TOO_FEW_ENGINES = frozenset({"NO_ENGINES", "NOT_ENOUGH_ENGINES"})
_USED_UP = frozenset({"REQUEST_REPEATED", "REQUEST_CONFLICT"})


class Begin(Enum):
    """What to do when an update was not begun."""

    WAIT = "ask again, with the same request"
    ANEW = "ask again, with a request id of its own"
    END = "it is refused"


def begin(error: WeightplaneError, *, enough_before: bool, renewed: bool) -> Begin:
    """`enough_before`: this push had engines, which may come back. `renewed`: its request id was changed already."""
    if isinstance(error, RemoteError):
        return Begin.WAIT if error.code in TRANSIENT_CODES | {"DEADLINE_EXCEEDED"} else Begin.END
    if error.reason in _USED_UP:
        return Begin.END if renewed else Begin.ANEW
    waits = error.reason in BEGIN_WAITS or (error.reason in _TOO_FEW_ENGINES and enough_before) or _knows_less(error)
    return Begin.WAIT if waits else Begin.END


def hello_passes(error: WeightplaneError) -> bool:
    """Whether asking for the lease again can help."""
    if isinstance(error, RemoteError):
        return error.code in TRANSIENT_CODES
    return error.reason in HELLO_WAITS


def update_passes(error: WeightplaneError, reasons: Iterable[str]) -> bool:
    """Whether a new update can succeed where this one ended with `error`; `reasons` are the required engines' own."""
    if isinstance(error, DeadlineExceeded):
        return error.phase == "gather_group"
    if not isinstance(error, (UpdateFailed, PeerLost, LinkFailed, IpcNotPossible)):
        return False
    return not PERMANENT.intersection(reasons)


def call_passes(error: WeightplaneError) -> bool:
    """Whether the same call to the coordinator may succeed a moment later."""
    if isinstance(error, RemoteError):
        return error.code in TRANSIENT_CODES | {"DEADLINE_EXCEEDED"}
    return error.reason in _COMES_BACK or _knows_less(error)


def fences(error: WeightplaneError | None) -> bool:
    """A later term was given: this trainer ends, with the code that nobody restarts (INV-7)."""
    return isinstance(error, StaleTerm) and not _knows_less(error)


def waits_for_a_person(error: WeightplaneError) -> bool:
    """Nothing but a person ends it."""
    return error.reason in _PERSON or _knows_less(error)


def _knows_less(error: WeightplaneError) -> bool:
    """A coordinator with an older ledger, which it does not know of yet: it refuses a term above its own."""
    return isinstance(error, StaleTerm) and error.got > error.current

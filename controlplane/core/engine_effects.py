"""What the core of an engine agent wants done: its effects, to be carried out in their order.

They say what, never how; who carries one out tells of its end by an event.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core import errors as e
from controlplane.core.engine_update import Update
from controlplane.core.versions import Term, UpdateId


@dataclass(frozen=True, slots=True)
class Remember:
    """Write to the agent's disk, before anything that follows."""

    term: Term
    coordinator_term: Term
    number: int


@dataclass(frozen=True, slots=True)
class Accept:
    stream: int
    layout_needed: bool
    attached: bool


@dataclass(frozen=True, slots=True)
class Verify:
    """Compute the checksums of these tensors; then all is in, if `last`."""

    stream: int
    tensors: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class SendReady:
    stream: int


@dataclass(frozen=True, slots=True)
class StartInstall:
    """Begin the install; it runs to its end whatever happens to the stream."""

    stream: int
    update: Update


@dataclass(frozen=True, slots=True)
class StartStreaming:
    """The first chunk of a streaming update came: begin its install. Chunks follow, and then its end."""

    stream: int
    update: Update


@dataclass(frozen=True, slots=True)
class FinishStreaming:
    """The commit frame stated what came: bring that install to its end, whatever happens to the stream."""

    stream: int
    update: Update


@dataclass(frozen=True, slots=True)
class CutStreaming:
    """No more of that install will come: end it, and say what it touched."""

    stream: int
    error: e.WeightplaneError


@dataclass(frozen=True, slots=True)
class EndStream:
    """Answer the stream with this error, and drop what it staged."""

    stream: int
    error: e.WeightplaneError


@dataclass(frozen=True, slots=True)
class DropStaged:
    """Unmap what that stream staged; nothing of it will be read any more."""

    stream: int


@dataclass(frozen=True, slots=True)
class InstallDecided:
    """Tell every stream attached to the update how it ended: None is applied."""

    update_id: UpdateId
    error: e.WeightplaneError | None


@dataclass(frozen=True, slots=True)
class StartSleep:
    """Quiesce, then free the devices. Nothing is claimed any more that this takes away."""

    level: int


@dataclass(frozen=True, slots=True)
class StartWake:
    """Take the devices again, then say `Woke`."""

    kv: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The state changed: send it whole, and look at the gate again."""


Effect = (
    Remember
    | Accept
    | Verify
    | SendReady
    | StartInstall
    | StartStreaming
    | FinishStreaming
    | CutStreaming
    | EndStream
    | DropStaged
    | InstallDecided
    | StartSleep
    | StartWake
    | Report
)

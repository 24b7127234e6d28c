"""Who calls, and what they may."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.errors.tree import Refused


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


@dataclass(eq=False)
class RateLimited(Refused):
    """The caller calls more often than one caller may. Come again after `retry_seconds`."""

    reason = "RATE_LIMITED"
    template = "{caller} calls more than {calls_per_second} times a second; come again in {retry_seconds} s"
    caller: str
    calls_per_second: float
    retry_seconds: float

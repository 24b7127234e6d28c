"""Who may call what: roles, the table of every RPC, and who may speak for whom. Pure.

Promises that an RPC which is not in the table is nobody's (default deny), and that a name in a certificate or a token
binds: an engine speaks as itself alone, a trainer as itself alone. Says nothing of how a caller proves who it is.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from controlplane.core.errors import IdentityMismatch, PermissionDenied

SCHEME = "weightplane"
ANY = "*"
"""In place of a run or of a name: it is bound to none."""
MAX_IDENTITY_LENGTH = 512
_NAME = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Role(enum.Enum):
    """What a caller is in the fleet."""

    COORDINATOR = "coordinator"
    TRAINER = "trainer"
    ENGINE = "engine"
    ROLLOUT = "rollout"
    VIEWER = "viewer"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller that proved who it is."""

    role: Role
    name: str = ANY
    """Of the engine, the trainer, the client or the person. ANY: of none in particular."""
    run_id: str = ANY
    """The run that it belongs to. ANY: to whichever."""

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("run", self.run_id)):
            if _NAME.fullmatch(text) is None:
                raise ValueError(f"{text!r} is no {what} of an identity: {_NAME.pattern}")

    def __str__(self) -> str:
        return f"{SCHEME}://{self.run_id}/{self.role.value}/{self.name}"


EVERYBODY = Principal(Role.ADMIN)
"""Who a caller is where nobody has to prove anything."""


def parse_identity(text: str) -> Principal:
    """`weightplane://RUN/ROLE/NAME`, as it stands in a certificate. Raises ValueError: it is none."""
    parts = urlsplit(text[:MAX_IDENTITY_LENGTH])
    role, _, name = parts.path.removeprefix("/").partition("/")
    if parts.scheme != SCHEME or parts.query or parts.fragment or role not in {r.value for r in Role}:
        raise ValueError(f"{text[:MAX_IDENTITY_LENGTH]!r} is no identity {SCHEME}://RUN/ROLE/NAME")
    return Principal(Role(role), name, parts.netloc)


_T, _E, _R, _V, _C = Role.TRAINER, Role.ENGINE, Role.ROLLOUT, Role.VIEWER, Role.COORDINATOR
_ALL = frozenset(Role)


def _may(*roles: Role) -> frozenset[Role]:
    """An admin may call everything."""
    return frozenset({Role.ADMIN, *roles})


POLICY: Mapping[str, frozenset[Role]] = {
    "/weightplane.v1.Fleet/Session": _may(_T, _E),
    "/weightplane.v1.Fleet/BeginUpdate": _may(_T),
    "/weightplane.v1.Fleet/WatchUpdate": _may(_T, _V),
    "/weightplane.v1.Fleet/AbortUpdate": _may(_T),
    "/weightplane.v1.Fleet/ReportStacks": _may(_T),
    "/weightplane.v1.Fleet/PublishCheckpoint": _may(_T),
    "/weightplane.v1.Fleet/RetireCheckpoint": _may(_T),
    "/weightplane.v1.Fleet/WatchRoutes": _may(_T, _R, _V),
    "/weightplane.v1.Operator/GetFleet": _may(_T, _V),
    "/weightplane.v1.Operator/WatchFleet": _may(_V),
    "/weightplane.v1.Operator/Plan": _may(_V),
    "/weightplane.v1.Operator/GetStacks": _may(),
    "/weightplane.v1.Operator/Rollback": _may(),
    "/weightplane.v1.Operator/AcceptLedger": _may(),
    "/weightplane.v1.Operator/KeepVersion": _may(),
    "/weightplane.v1.Operator/ReleaseVersion": _may(),
    "/weightplane.v1.WeightUpdate/UpdateWeights": _may(_T, _C),
    "/weightplane.v1.Rollout/Generate": _may(_R, _C),
    "/weightplane.v1.Rollout/Score": _may(_R, _C),
    "/weightplane.v1.Rollout/Abort": _may(_R, _C),
    "/weightplane.v1.Lifecycle/PauseGeneration": _may(),
    "/weightplane.v1.Lifecycle/ResumeGeneration": _may(),
    "/weightplane.v1.Lifecycle/Sleep": _may(_T),
    "/weightplane.v1.Lifecycle/WakeUp": _may(_T),
    "/weightplane.v1.Lifecycle/Drain": _may(),
    "/weightplane.v1.Lifecycle/AbortRequests": _may(),
    "/weightplane.v1.Lifecycle/FlushCache": _may(),
    "/weightplane.v1.Lifecycle/GetStatus": _may(_T, _C, _V),
    "/weightplane.v1.Lifecycle/WatchStatus": _may(_T, _C, _V),
    "/weightplane.v1.Lifecycle/Shutdown": _may(),
    "/weightplane.v1.Lifecycle/TailLogs": _may(),
    "/weightplane.v1.Lifecycle/DumpStacks": _may(_T),
    "/weightplane.local.v1.EngineMembers/Attach": _may(_E),
    "/grpc.health.v1.Health/Check": _ALL,
    "/grpc.health.v1.Health/List": _ALL,
    "/grpc.health.v1.Health/Watch": _ALL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL,
    "/grpc.channelz.v1.Channelz/GetTopChannels": _may(),
    "/grpc.channelz.v1.Channelz/GetServers": _may(),
    "/grpc.channelz.v1.Channelz/GetServer": _may(),
    "/grpc.channelz.v1.Channelz/GetServerSockets": _may(),
    "/grpc.channelz.v1.Channelz/GetChannel": _may(),
    "/grpc.channelz.v1.Channelz/GetSubchannel": _may(),
    "/grpc.channelz.v1.Channelz/GetSocket": _may(),
}
"""Every RPC of every service, and whose it is. A test walks the descriptors of the servers."""


HTTP_POLICY: Mapping[str, frozenset[Role]] = {
    "page /api/fleet": _may(_V),
    "page /api/watch": _may(_V),
    "openai /v1/completions": _may(_R),
    "openai /v1/chat/completions": _may(_R),
    "openai /v1/models": _may(_R, _V),
    "openai /version": _may(_R, _V),
    "openai /tokenize": _may(_R),
    "openai /detokenize": _may(_R),
}
"""Every route of the ports that speak HTTP and tell of the fleet or use an engine, and whose it is. What tells nothing
is everybody's: the page's own files, and an engine's /health."""


def check_call(principal: Principal, method: str, run_id: str = "") -> None:
    """Raises PermissionDenied: this role may not call it, or it belongs to another run than this server's (empty: the
    server does not know its run yet)."""
    roles = POLICY.get(method) or HTTP_POLICY.get(method, frozenset())
    if principal.role not in roles:
        wanted = " or ".join(sorted(role.value for role in roles)) or "none: nobody may call it"
        raise PermissionDenied(method=method, caller=str(principal), wanted=wanted, had=principal.role.value)
    if run_id and principal.run_id not in (ANY, run_id):
        raise PermissionDenied(
            method=method, caller=str(principal), wanted=f"the run {run_id}", had=f"the run {principal.run_id}"
        )


def check_speaks_as(principal: Principal, role: Role, name: str) -> None:
    """Raises IdentityMismatch: it is neither that one, nor of that role and bound to no name, nor an admin."""
    if principal.role is Role.ADMIN:
        return
    if principal.role is not role or principal.name not in (ANY, name):
        raise IdentityMismatch(caller=str(principal), claimed=f"{role.value} {name}")


def check_role(principal: Principal, role: Role) -> None:
    """Raises IdentityMismatch: it is neither of that role nor an admin."""
    if principal.role not in (Role.ADMIN, role):
        raise IdentityMismatch(caller=str(principal), claimed=role.value)

"""A certificate authority for a test, and who is who under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from controlplane.core.access import ANY, Principal, Role
from controlplane.rpc.security import TlsSettings
from controlplane.rpc.security.authority import Authority, issue, open_authority
from controlplane.rpc.security.tokens import add_token, new_token

HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class People:
    """Certificates, made when they are asked for."""

    directory: Path
    authority: Authority

    def __call__(self, node: str, run_id: str = ANY) -> TlsSettings:
        """Of `ROLE/NAME`."""
        role, _, name = node.partition("/")
        return self.issued(Principal(Role(role), name or ANY, run_id))

    def issued(
        self, principal: Principal, *, hosts: Sequence[str] = HOSTS, days: float = 1.0, name: str | None = None
    ) -> TlsSettings:
        file = name or "-".join((principal.role.value, principal.name, principal.run_id)).replace(ANY, "any")
        if not (self.directory / f"{file}.pem").exists():
            issue(self.authority, principal, hosts, days, self.directory, name=file)
        return TlsSettings(
            ca=self.directory / "ca.pem",
            cert=self.directory / f"{file}.pem",
            key=self.directory / f"{file}.key",
        )


def token_for(file: Path, role: Role, name: str = "somebody") -> str:
    """A new token, whose hash is in `file`."""
    token = new_token()
    add_token(file, Principal(role, name), token)
    return token


def people(directory: Path) -> People:
    """Under an authority of its own in `directory`."""
    return People(directory, open_authority(directory))

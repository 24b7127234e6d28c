"""Bearer tokens: for callers without certificates. The server's file holds their hashes, never a token.

A token is 32 random bytes, so one SHA-256 keeps it: there is no dictionary to try, and a slow hash would only slow each
call. Every hash is compared, in constant time, whether or not an earlier one was equal.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from controlplane import config
from controlplane.core.access import ANY, Principal, Role
from controlplane.rpc.security.files import Reread

PREFIX = "wpt_"
"""So that a token is known as one where it should not be."""
TOKEN_BYTES = 32
MAX_TOKENS = 1000
MAX_TOKEN_LENGTH = 256


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A `[[token]]` of the file.

    Raises:
        ValueError: what it may not say.
    """

    role: Role
    name: str
    sha256: str
    run: str = ANY
    expires: str = ""
    """Date and time with its zone, as ISO 8601. Empty: never."""

    def __post_init__(self) -> None:
        Principal(self.role, self.name, self.run)
        if len(self.sha256) != hashlib.sha256().digest_size * 2 or not set(self.sha256) <= set("0123456789abcdef"):
            raise ValueError("sha256: 64 hexadecimal digits are expected")
        if self.expires and _time(self.expires).tzinfo is None:
            raise ValueError(f"expires: {self.expires!r} has no time zone")

    def expired(self, now: datetime.datetime) -> bool:
        return bool(self.expires) and now >= _time(self.expires)


@dataclass(frozen=True, slots=True)
class _File:
    token: tuple[TokenEntry, ...] = ()

    def __post_init__(self) -> None:
        if len(self.token) > MAX_TOKENS:
            raise ValueError(f"{len(self.token)} tokens; at most {MAX_TOKENS}")


class Tokens:
    """Those of a file, as it is now."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError: it cannot be read, or is no file of tokens."""
        try:
            self._file = Reread([path], lambda: config.load(_File, path))
        except OSError as error:
            raise ValueError(f"tls.tokens: {path}: {error.strerror}") from error

    def find(self, token: str, now: datetime.datetime) -> Principal | None:
        """Whose it is. None: nobody's, or not any more."""
        shown, found = hash_of(token[:MAX_TOKEN_LENGTH]), None
        for entry in self._file.get().token:
            if hmac.compare_digest(entry.sha256, shown) and not entry.expired(now):
                found = Principal(entry.role, entry.name, entry.run)
        return found

    def count(self, now: datetime.datetime) -> tuple[int, int]:
        """How many there are, and how many of them have run out."""
        entries = self._file.get().token
        return len(entries), sum(entry.expired(now) for entry in entries)


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def add_token(path: Path, principal: Principal, token: str, expires: datetime.datetime | None = None) -> None:
    """Write its hash at the end of the file, which is made if it is missing. Raises ValueError, OSError."""
    held = len(config.load(_File, path).token) if path.exists() else 0
    if held >= MAX_TOKENS:
        raise ValueError(f"{path} has {held} tokens, which is the most; remove some")
    lines = [f'role = "{principal.role.value}"', f'name = "{principal.name}"', f'sha256 = "{hash_of(token)}"']
    lines += [f'run = "{principal.run_id}"'] if principal.run_id != ANY else []
    lines += [f'expires = "{expires.isoformat(timespec="seconds")}"'] if expires is not None else []
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
        file.write("[[token]]\n" + "\n".join(lines) + "\n\n")


def read_token(path: Path) -> str:
    """The token of a client's file. Raises ValueError, OSError."""
    token = path.read_text().strip()
    if not token or not token.isascii() or not token.isprintable() or len(token) > MAX_TOKEN_LENGTH:
        raise ValueError(f"{path} holds no token")
    return token


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)

"""The one question of every server at every call: who are you, and may you do this?

Where neither TLS nor tokens are set (a server on loopback, or one that was told to be insecure) nobody is asked, and
everybody is an admin. A token, also a wrong one, is never shown in an error or a log.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grpc

from controlplane.core.access import ANY, EVERYBODY, SCHEME, Principal, check_call, parse_identity
from controlplane.core.errors import PermissionDenied, Unauthenticated
from controlplane.core.rates import DEFAULT_RATES, UNLIMITED, CallRates, RateSettings
from controlplane.rpc.security.certificates import reread_pems, server_credentials
from controlplane.rpc.security.settings import PLAIN, TlsSettings, check_listen
from controlplane.rpc.security.tokens import Tokens

_caller: ContextVar[Principal] = ContextVar("weightplane_caller", default=EVERYBODY)
_BEARER = "bearer "
_URI_OF_PEER = "peer_uri"
"""gRPC's name for the URIs of a certificate, in an auth context."""


def caller() -> Principal:
    """Who made the call that is being answered."""
    return _caller.get()


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """How a server is secured. `run_id`: whose callers alone are taken; empty: not known."""

    tls: TlsSettings = PLAIN
    insecure: bool = False
    run_id: str = ""
    rates: RateSettings = DEFAULT_RATES
    """How often one caller may call what is not `UNLIMITED`."""


class Guard:
    """Of one server."""

    def __init__(self, security: ServerSecurity) -> None:
        """Reads the files. Raises ValueError: they cannot be used."""
        self._security = security
        tls = security.tls
        self._tokens = Tokens(tls.tokens) if tls.tokens is not None else None
        self._pems = reread_pems(tls, tell_end=True) if tls.serves_tls else None
        self._rates = CallRates(security.rates)
        self.asks = tls.secured
        """False: everybody is an admin."""

    def bind(self, server: grpc.aio.Server, listen: str) -> int:
        """Bind an address, with TLS where it is set. Returns the port.

        Raises:
            ValueError: others reach it unasked (see check_listen).
            RuntimeError: it cannot be bound.
        """
        check_listen(listen, self._security.tls, self._security.insecure)
        if self._pems is None:
            return server.add_insecure_port(listen)
        credentials = server_credentials(self._pems, client_certificates=self._tokens is None)
        return server.add_secure_port(listen, credentials)

    def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """From then on `caller` says who it is.

        Raises:
            Unauthenticated, PermissionDenied, RateLimited.
        """
        host = context.peer().rpartition(":")[0]
        try:
            principal = self._principal(method, context)
        except (Unauthenticated, PermissionDenied):
            self._rates.take(host, time.monotonic())  # who is refused pays too, whatever it called
            raise
        if method not in UNLIMITED:
            self._rates.take(_whose_bucket(principal, host), time.monotonic(), method)

    def _principal(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Principal:
        if not self.asks:
            return EVERYBODY
        principal = self._by_token(context) if self._tokens is not None else by_uris(_uris(context))
        check_call(principal, method, self._security.run_id)
        _caller.set(principal)
        return principal

    def _by_token(self, context: grpc.aio.ServicerContext[Any, Any]) -> Principal:
        assert self._tokens is not None, "asked for where there are some"
        metadata: Any = context.invocation_metadata() or ()
        return by_token(self._tokens, [value for key, value in metadata if key == "authorization"])


def _whose_bucket(principal: Principal, host: str) -> str:
    """One that is bound to a name is itself wherever it calls from; others share theirs with their host alone."""
    if principal is EVERYBODY:
        return host
    return str(principal) if principal.name != ANY else f"{principal} at {host}"


def by_token(tokens: Tokens, shown: Sequence[object]) -> Principal:
    """Whose call it is, by its headers `authorization`. Raises Unauthenticated."""
    if len(shown) != 1 or not isinstance(shown[0], str) or not shown[0].lower().startswith(_BEARER):
        raise Unauthenticated(cause="one bearer token is expected (authorization: Bearer …)")
    principal = tokens.find(shown[0][len(_BEARER) :].strip(), datetime.datetime.now(datetime.UTC))
    if principal is None:
        raise Unauthenticated(cause="the token is not known here, or expired")
    return principal


def by_uris(names: Sequence[bytes]) -> Principal:
    """Whose call it is, by the URIs of its certificate. Raises Unauthenticated."""
    ours = [name for name in names if name.startswith(SCHEME.encode())]
    if len(ours) != 1:
        raise Unauthenticated(
            cause=f"its certificate has {len(ours)} names {SCHEME}://RUN/ROLE/NAME; exactly one says who it is"
        )
    return _identity(ours[0])


def _uris(context: grpc.aio.ServicerContext[Any, Any]) -> Sequence[bytes]:
    return tuple(context.auth_context().get(_URI_OF_PEER, ()))


@lru_cache(maxsize=4096)
def _identity(name: bytes) -> Principal:
    try:
        return parse_identity(name.decode("ascii"))
    except ValueError as error:
        raise Unauthenticated(cause=f"its certificate's name: {error}") from error

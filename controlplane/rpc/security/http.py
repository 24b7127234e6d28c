"""The question of the gRPC ports, at the ports that speak HTTP (the page, the OpenAI door): who are you, and may you?

Promises the same identities, the same kind of table and the same errors as `guard`; certificates are re-read at each
handshake; nobody is asked only where the port has neither certificate nor tokens. A token is never shown in an error.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from controlplane.core.access import Principal, check_call
from controlplane.core.errors import PermissionDenied, Unauthenticated, WeightplaneError
from controlplane.rpc.security.certificates import Pems, reread_pems
from controlplane.rpc.security.files import Reread
from controlplane.rpc.security.guard import by_token, by_uris
from controlplane.rpc.security.settings import TlsSettings
from controlplane.rpc.security.tokens import Tokens

BEARER_HEADER = ("WWW-Authenticate", "Bearer")
"""With a 401: what is expected."""
_HTTP_1 = "http/1.1"


def http_tls(tls: TlsSettings, tokens: Path | None) -> TlsSettings:
    """Those of a port that may take tokens of its own, where the other ports ask for certificates."""
    return tls if tokens is None else replace(tls, tokens=tokens)


class HttpGuard:
    """Of one port."""

    def __init__(self, tls: TlsSettings, run_id: str = "") -> None:
        """Reads the files. Raises ValueError: they cannot be used. `run_id`: whose callers alone are taken."""
        self._run_id = run_id
        self._tls = tls
        self._tokens = Tokens(tls.tokens) if tls.tokens is not None else None
        self._pems = reread_pems(tls, tell_end=True) if tls.serves_tls else None
        self.asks = tls.secured
        """False: everybody is an admin."""
        self.scheme = "http" if self._pems is None else "https"

    def context(self) -> ssl.SSLContext | None:
        """For the server that speaks HTTP. None: it speaks it in clear."""
        return None if self._pems is None else _rereading(self._pems, self._made)

    def admit(self, route: str, authorization: Sequence[str], peer: Mapping[str, Any] | None) -> None:
        """`authorization`: every header of that name. `peer`: the caller's certificate, as Python's ssl tells it.

        Raises:
            Unauthenticated, PermissionDenied.
        """
        if not self.asks:
            return
        check_call(self._principal(authorization, peer), route, self._run_id)

    def _principal(self, authorization: Sequence[str], peer: Mapping[str, Any] | None) -> Principal:
        if self._tokens is not None:
            return by_token(self._tokens, authorization)
        names = (peer or {}).get("subjectAltName", ())
        return by_uris([value.encode() for kind, value in names if kind == "URI"])

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        assert self._tls.cert is not None, "asked for with one"
        context.load_cert_chain(self._tls.cert, self._tls.key)
        context.set_alpn_protocols([_HTTP_1])
        if self._tokens is None:
            context.load_verify_locations(self._tls.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def status_of(error: WeightplaneError) -> int | None:
    """Of a refusal of this module; None: it is none."""
    if isinstance(error, Unauthenticated):
        return 401
    return 403 if isinstance(error, PermissionDenied) else None


def _rereading(pems: Reread[Pems], make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """A context whose connections get one of the files as they are at their handshake."""
    outer, newest, reads = make(), make(), pems.reads

    def turn(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal newest, reads
        pems.get()
        if pems.reads != reads:
            newest, reads = make(), pems.reads
        connection.context = newest

    outer.sni_callback = turn
    return outer

"""Why no secure connection comes about: gRPC says UNAVAILABLE, a look at the peer's port and our own files says more.

A server that does not take our certificate closes without a word, so that case is known by leaving the others out.
Nothing is sent but the handshake. Every look has a deadline.
"""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from controlplane.core.errors import TlsFailed, WeightplaneError
from controlplane.rpc.addresses import split_address
from controlplane.rpc.errors import RemoteError
from controlplane.rpc.security.settings import PLAIN, TlsSettings

LOOK_SECONDS = 2.0
"""For each of connecting, the handshake, and the peer's first word."""
PLAIN_LOOK_SECONDS = 0.5
"""The same where we speak no TLS: then it is seldom what is wrong, and who waits should not wait for that."""
_EXPIRED, _NOT_YET = 10, 9
_OTHER_NAME = frozenset({62, 64})
"""OpenSSL's numbers of what a certificate was refused for: the name, or the address."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A peer, and how it is called."""

    target: str = ""
    tls: TlsSettings = PLAIN

    async def explained(self, error: WeightplaneError) -> WeightplaneError:
        """`error`, or TlsFailed where it is a connection that TLS kept from coming about."""
        return await explained(error, self.target, self.tls)


async def explained(error: WeightplaneError, target: str, tls: TlsSettings) -> WeightplaneError:
    if not isinstance(error, RemoteError) or error.code != "UNAVAILABLE" or not target:
        return error
    cause = await asyncio.to_thread(diagnose, target, tls)
    return TlsFailed(peer=target, cause=cause) if cause else error


def diagnose(target: str, tls: TlsSettings) -> str:
    """What is wrong between us and the peer, in words; empty: TLS is not what is wrong, or nobody listens."""
    try:
        host, port = split_address(target)
    except ValueError:
        return ""
    try:
        limit = PLAIN_LOOK_SECONDS if tls.ca is None else LOOK_SECONDS
        with socket.create_connection((host, port), limit) as connection:
            connection.settimeout(limit)
            return _of_plain(connection) if tls.ca is None else _of_tls(connection, tls, host)
    except OSError:
        return ""


def _of_plain(connection: socket.socket) -> str:
    """We speak no TLS. Does the peer?"""
    try:
        with _any_context().wrap_socket(connection):
            return "it speaks TLS and we do not: set tls.ca, and tls.cert and tls.key or tls.token"
    except (ssl.SSLError, OSError):
        return ""


def _of_tls(connection: socket.socket, tls: TlsSettings, host: str) -> str:
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        context.set_alpn_protocols(["h2"])
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ValueError) as error:
        return f"our files cannot be used: {error}"
    ours, peer = _of_ours(tls), connection.getpeername()[:2]
    if ours:
        return ours
    try:
        with context.wrap_socket(connection, server_hostname=tls.server_name or host) as secured:
            return _after_handshake(secured, tls)
    except ssl.SSLCertVerificationError as error:
        return _refused(error, tls, peer)
    except ssl.SSLError as error:
        return "it speaks no TLS, and we do" if error.reason in _NO_TLS else f"the handshake failed: {error.reason}"
    except ConnectionError:
        return "it speaks no TLS, and we do"


_NO_TLS = ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")


def _after_handshake(secured: ssl.SSLSocket, tls: TlsSettings) -> str:
    """In TLS 1.3 a client's certificate is judged after the client's handshake; gRPC's server speaks first then."""
    try:
        closed = not secured.recv(1)
    except TimeoutError:
        closed = False
    except OSError:
        closed = True
    if not closed:
        return ""
    if tls.cert is None:
        return "it asks for a certificate, and we have none: set tls.cert and tls.key"
    return f"it did not take our certificate {tls.cert}: its authorities are others than ours"


def _of_ours(tls: TlsSettings) -> str:
    """What is wrong with our own certificate, as far as we can see."""
    if tls.cert is None or tls.ca is None:
        return ""
    from cryptography import x509

    cert = x509.load_pem_x509_certificates(tls.cert.read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    if now > cert[0].not_valid_after_utc:
        return f"our certificate {tls.cert} expired at {_time(cert[0].not_valid_after_utc)}"
    if now < cert[0].not_valid_before_utc:
        return f"our certificate {tls.cert} is valid only from {_time(cert[0].not_valid_before_utc)}"
    authorities = {ca.subject for ca in x509.load_pem_x509_certificates(tls.ca.read_bytes())}
    if cert[-1].issuer not in authorities:
        return f"our certificate {tls.cert} is not from an authority in {tls.ca}"
    return ""


def _refused(error: ssl.SSLCertVerificationError, tls: TlsSettings, peer: tuple[str, int]) -> str:
    if error.verify_code in _OTHER_NAME:
        names = _names_of(peer) or "others"
        return f"its certificate is not for that address: {error.verify_message}; it has {names}; see tls.server_name"
    if error.verify_code == _EXPIRED:
        return "its certificate has expired"
    if error.verify_code == _NOT_YET:
        return "its certificate is not valid yet: are the clocks right?"
    return f"its certificate is not from an authority in {Path(str(tls.ca))}: {error.verify_message}"


def _names_of(peer: tuple[str, int]) -> str:
    """What its certificate says it is, unverified: for people."""
    from cryptography import x509

    try:
        with socket.create_connection(peer, LOOK_SECONDS) as connection, _any_context().wrap_socket(connection) as tls:
            shown = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return ""
    return ", ".join(str(name.value) for name in names)


def _any_context() -> ssl.SSLContext:
    """To look only: nothing is sent over it."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _time(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M UTC")

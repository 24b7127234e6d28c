"""Certificates of this process, as gRPC takes them, re-read when their files change.

A server shows what lies on the disk at each new handshake; connections that stand go on. A pair that does not fit, or
that cannot be read, is never taken.
"""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from controlplane.rpc.security.files import Reread
from controlplane.rpc.security.settings import TlsSettings

log = structlog.get_logger(__name__)

SOON = datetime.timedelta(days=7)
"""Before a certificate's end: from then on each reading of it is a warning."""


@dataclass(frozen=True, slots=True)
class Pems:
    """Contents of the files. Not shown: a key is among them."""

    ca: bytes
    cert: bytes | None
    key: bytes | None

    def __repr__(self) -> str:
        return "Pems(…)"


def reread_pems(tls: TlsSettings, *, tell_end: bool = False) -> Reread[Pems]:
    """Of settings with `ca`. `tell_end`: log at each reading how long the certificate is good still.

    Raises:
        ValueError: they cannot be read, or do not go together.
    """
    paths = [path for path in (tls.ca, tls.cert, tls.key) if path is not None]
    try:
        return Reread(paths, lambda: _read(tls, tell_end))
    except OSError as error:
        raise ValueError(f"tls: {error.filename}: {error.strerror}") from error


def server_credentials(pems: Reread[Pems], *, client_certificates: bool) -> grpc.ServerCredentials:
    """Of settings with `cert`. `client_certificates`: callers must have one, else none is asked for."""

    def now() -> grpc.ServerCertificateConfiguration:
        found = pems.get()
        assert found.key is not None, "a server has one"
        assert found.cert is not None, "it goes with the key"
        return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.ca)

    return grpc.dynamic_ssl_server_credentials(now(), now, require_client_authentication=client_certificates)


def channel_credentials(pems: Pems) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


def _read(tls: TlsSettings, tell_end: bool) -> Pems:
    assert tls.ca is not None, "asked for with one"
    _check(tls)
    pems = Pems(tls.ca.read_bytes(), _bytes(tls.cert), _bytes(tls.key))
    if pems.cert is not None and tell_end:
        _tell_end(tls, pems.cert)
    return pems


def _tell_end(tls: TlsSettings, cert: bytes) -> None:
    """A certificate that runs out stops the next connection, not those that stand: so it is told beforehand."""
    from cryptography import x509

    end = x509.load_pem_x509_certificate(cert).not_valid_after_utc
    left = end - datetime.datetime.now(datetime.UTC)
    tell = log.warning if left < SOON else log.info
    tell("certificate_read", file=str(tls.cert), expires=end.isoformat(), days_left=left.days)


def _check(tls: TlsSettings) -> None:
    """OpenSSL reads them as TLS would: form, and that the key is the certificate's. Raises ValueError, OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except ssl.SSLError as error:
        files = ", ".join(str(path) for path in (tls.ca, tls.cert, tls.key) if path is not None)
        raise ValueError(f"tls: {files}: {_words(error)}") from error


def _words(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    return f"no certificates and key as PEM ({error.reason or error})"


def _no_password() -> str:
    raise ValueError("tls.key: a key with a password cannot be read by a daemon")


def _bytes(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()

"""A certificate authority of one's own, for a laptop, a lab or a first cluster: `weightplane certs dev`.

An authority, and a certificate for each role, in a directory. Keys are readable by their owner alone. Nothing that is
there is overwritten: the authority is used again, so certificates can be added.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from controlplane.core.access import ANY, Principal

AUTHORITY_DAYS = 3650
CLOCKS_APART = datetime.timedelta(minutes=5)
"""A certificate is valid from a little before its making, for hosts whose clocks go behind."""
Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Authority:
    """Its certificate and its key."""

    cert: x509.Certificate
    key: Key


def open_authority(directory: Path) -> Authority:
    """That of `directory`, made if there is none. Raises OSError, ValueError."""
    directory.mkdir(parents=True, exist_ok=True)
    cert_file, key_file = directory / "ca.pem", directory / "ca.key"
    if cert_file.exists():
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_file} is no key of ours")
        return Authority(x509.load_pem_x509_certificate(cert_file.read_bytes()), key)
    key = ec.generate_private_key(ec.SECP256R1())
    # Two authorities have two names: a certificate then says which of them it is from.
    name = _name(f"Weightplane development authority {os.urandom(4).hex()}")
    builder = _builder(name, name, key, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    cert = builder.add_extension(_usage(authority=True), critical=True).sign(key, hashes.SHA256())
    _write(key_file, _key_pem(key))
    _write(cert_file, _pem(cert), mode=0o644)
    return Authority(cert, key)


def issue(
    authority: Authority,
    principal: Principal,
    hosts: Sequence[str],
    days: float,
    directory: Path,
    name: str | None = None,
) -> Path:
    """Write `NAME.pem` and `NAME.key`; `NAME` is the role, and the node where it is bound to one.

    Raises:
        FileExistsError: they are there.
        OSError, ValueError: they cannot be written; a host is none.
    """
    file = name or "-".join(p for p in (principal.role.value, principal.name) if p != ANY)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(str(principal)[:64]), authority.cert.subject, key, days)
    names = [x509.UniformResourceIdentifier(str(principal)), *map(_host, hosts)]
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    cert = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(_usage(authority=False), critical=True)
        .sign(authority.key, hashes.SHA256())
    )
    _write(directory / f"{file}.key", _key_pem(key))
    _write(directory / f"{file}.pem", _pem(cert), mode=0o644)
    return directory / f"{file}.pem"


def _builder(subject: x509.Name, issuer: x509.Name, key: Key, days: float) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + datetime.timedelta(days=days)) - CLOCKS_APART)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: Key) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)

"""What can be wrong with the certificates and tokens of a daemon before it starts, or of a command before it calls.

Promises: nothing is changed and nothing is sent; keys and tokens are opened and never shown; a file that is missing or
unreadable is a finding. A chain is judged by a handshake of OpenSSL with itself, in memory: both sides show the
certificate and both check it, as two daemons would.
"""

from __future__ import annotations

import datetime
import os
import ssl
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from cryptography import x509

from controlplane.cli.doctor_checks import Check, Verdict
from controlplane.cli.doctor_config import Daemon
from controlplane.config import ConfigError
from controlplane.core.access import ANY, SCHEME, Principal, Role, parse_identity
from controlplane.rpc.addresses import is_loopback, split_address
from controlplane.rpc.security import TlsSettings
from controlplane.rpc.security.certificates import SOON, reread_pems
from controlplane.rpc.security.tokens import Tokens, read_token

ROUNDS = 4
"""Of a handshake's flights; TLS 1.3 needs two."""
UNSPECIFIED = frozenset({"0.0.0.0", "::"})
"""Addresses to listen on that nobody calls."""


def of_daemons(daemons: Iterable[Daemon]) -> list[Check]:
    """All that their `[tls]` name. Of several with the same files only the first is told whole; of the others, what is
    wrong with them alone."""
    found: list[Check] = []
    told: set[TlsSettings] = set()
    for daemon in daemons:
        checks = of_daemon(daemon) if daemon.tls not in told else [*_of_certificate(daemon)]
        found += [c for c in checks if daemon.tls not in told or c.verdict is not Verdict.GOOD]
        told.add(daemon.tls)
    return found


def of_daemon(daemon: Daemon) -> list[Check]:
    """All that its `[tls]` names, and the tokens of its port that speaks HTTP."""
    http = [] if daemon.http_tokens is None else [_served_tokens(f"HTTP tokens of {daemon}", daemon.http_tokens)]
    return [*_of_tls(daemon), *http]


def _of_tls(daemon: Daemon) -> list[Check]:
    if not daemon.tls.secured and daemon.tls.ca is None:
        local = is_loopback(_host(daemon.called_at))
        where = "only this host reaches it" if local else "`insecure` says that the network keeps strangers out"
        return [Check(f"tls of {daemon}", Verdict.NOTE, f"none: whoever reaches it is an admin; {where}")]
    return [*of_files(str(daemon), daemon.tls), *_of_certificate(daemon)]


def of_files(whose: str, tls: TlsSettings) -> list[Check]:
    """Without asking whom they are for."""
    found = [*_readable(whose, tls)]
    if any(check.verdict is Verdict.BAD for check in found):
        return found
    return [*found, *_chain(whose, tls), *_tokens(whose, tls)]


def _readable(whose: str, tls: TlsSettings) -> Iterator[Check]:
    for what, path in (("ca", tls.ca), ("cert", tls.cert), ("key", tls.key)):
        if path is not None and (cause := _unreadable(path)):
            advice = f"name the file in tls.{what}, and let the daemon's user read it"
            yield Check(f"tls.{what} of {whose}", Verdict.BAD, f"{path}: {cause}", advice)
    for what, path in (("key", tls.key), ("token", tls.token)):
        if path is not None and not _unreadable(path):
            yield secret_mode(f"tls.{what} of {whose}", path)


def secret_mode(name: str, path: Path) -> Check:
    """Whoever reads a key or a token can be its owner."""
    mode = stat.S_IMODE(path.stat().st_mode)
    found = f"{path}: mode {mode:04o}"
    if mode & stat.S_IRWXO:
        return Check(name, Verdict.BAD, f"{found}: every user of this host can use it", f"chmod 600 {path}")
    if mode & stat.S_IRWXG:
        return Check(name, Verdict.NOTE, f"{found}: its group can use it too", f"chmod 600 {path}")
    return Check(name, Verdict.GOOD, found)


def _chain(whose: str, tls: TlsSettings) -> Iterator[Check]:
    """That they fit, are from the authority, and for how long they are good."""
    if tls.ca is None:
        return
    name = f"certificate of {whose}"
    try:
        reread_pems(tls)
    except ValueError as error:
        advice = "cert and key are one pair as PEM, without a password, and ca has the authority's certificates"
        yield Check(name, Verdict.BAD, str(error), advice)
        return
    if tls.cert is None:
        yield Check(name, Verdict.GOOD, f"none; {tls.ca} says whom it believes")
        return
    yield expiry(name, x509.load_pem_x509_certificate(tls.cert.read_bytes()), datetime.datetime.now(datetime.UTC))
    if cause := distrust(tls):
        advice = f"have it issued by an authority in {tls.ca}, for servers and for clients, with those in between"
        yield Check(f"chain of {whose}", Verdict.BAD, f"{tls.cert}: {cause}", advice)
    else:
        yield Check(f"chain of {whose}", Verdict.GOOD, f"{tls.cert} is from an authority in {tls.ca}")


def expiry(name: str, cert: x509.Certificate, now: datetime.datetime) -> Check:
    left = cert.not_valid_after_utc - now
    found = f"good until {cert.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, {left.days} days"
    renew = "put a new one, with its key, in the old files' place: no restart is needed"
    if left <= datetime.timedelta(0):
        return Check(name, Verdict.BAD, f"expired at {cert.not_valid_after_utc:%Y-%m-%d %H:%M} UTC", renew)
    if now < cert.not_valid_before_utc:
        advice = "is this host's clock right?"
        return Check(name, Verdict.BAD, f"good only from {cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC", advice)
    return Check(name, Verdict.NOTE, found, renew) if left < SOON else Check(name, Verdict.GOOD, found)


def distrust(tls: TlsSettings) -> str:
    """Why a peer with the same authorities would not take the certificate; empty: it would."""
    try:
        _handshake(_context(tls, ssl.PROTOCOL_TLS_CLIENT), _context(tls, ssl.PROTOCOL_TLS_SERVER))
    except ssl.SSLCertVerificationError as error:
        return str(error.verify_message)
    except ssl.SSLError as error:
        return str(error.reason)
    return ""


def _context(tls: TlsSettings, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tls.ca)
    assert tls.cert is not None, "asked for with one"
    context.load_cert_chain(tls.cert, tls.key)
    return context


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Raises ssl.SSLError of whichever side refused."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)]
    for _ in range(ROUNDS):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
    if ends:
        raise ssl.SSLError("the handshake did not end")


def _of_certificate(daemon: Daemon) -> Iterator[Check]:
    """Whom it names, against whom it is for."""
    try:
        assert daemon.tls.cert is not None
        cert = x509.load_pem_x509_certificate(daemon.tls.cert.read_bytes())
    except (AssertionError, OSError, ValueError):
        return  # told before, or there is none
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    yield identity(daemon, names.get_values_for_type(x509.UniformResourceIdentifier))
    addresses = names.get_values_for_type(x509.IPAddress)
    yield address(daemon, [*names.get_values_for_type(x509.DNSName), *map(str, addresses)])


def identity(daemon: Daemon, uris: list[str]) -> Check:
    """The one name that says who it is."""
    name, wanted = f"identity of {daemon}", Principal(daemon.role, daemon.name or ANY, daemon.run_id or ANY)
    node = f"{daemon.role.value}/{daemon.name}" if daemon.name else daemon.role.value
    advice = f"one that says {wanted}: weightplane certs dev DIR --node {node} --run {wanted.run_id}"
    if not daemon.name:
        advice = f"one that says {wanted}: weightplane certs dev DIR --run {wanted.run_id}"
    ours = [uri for uri in uris if uri.startswith(f"{SCHEME}://")]
    if len(ours) != 1:
        return Check(name, Verdict.BAD, f"the certificate has {len(ours)} names {SCHEME}://RUN/ROLE/NAME", advice)
    try:
        found = parse_identity(ours[0])
    except ValueError as error:
        return Check(name, Verdict.BAD, str(error), advice)
    mine = found.role in (wanted.role, Role.ADMIN) and _fits(found.name, wanted.name)
    if not mine or not _fits(found.run_id, wanted.run_id):
        return Check(name, Verdict.BAD, f"the certificate is {found}, and this is {wanted}", advice)
    return Check(name, Verdict.GOOD, str(found))


def _fits(found: str, wanted: str) -> bool:
    return ANY in (found, wanted) or found == wanted


def address(daemon: Daemon, hosts: list[str]) -> Check:
    """Whether callers find the address that they call among its names."""
    name, host = f"name of {daemon}", _host(daemon.called_at)
    shown = ", ".join(hosts) or "none"
    if host in UNSPECIFIED:
        return Check(name, Verdict.NOTE, f"it has {shown}; which of them is called, the settings do not say")
    if host in hosts or any(h.startswith("*.") and host.partition(".")[2] == h[2:] for h in hosts):
        return Check(name, Verdict.GOOD, f"{host} is among its names")
    advice = f"issue it for {host} too (--host {host}), or let callers set tls.server_name"
    return Check(name, Verdict.NOTE, f"it is called at {host}, and its certificate is for {shown}", advice)


def _tokens(whose: str, tls: TlsSettings) -> Iterator[Check]:
    if tls.tokens is not None:
        yield _served_tokens(f"tls.tokens of {whose}", tls.tokens)
    if tls.token is not None:
        try:
            read_token(tls.token)
        except (OSError, ValueError) as error:
            advice = "weightplane token new prints one: write it, alone, to that file"
            yield Check(f"tls.token of {whose}", Verdict.BAD, str(error), advice)


def _served_tokens(name: str, path: Path) -> Check:
    make = f"weightplane token new --role ROLE --name NAME --file {path}"
    try:
        total, expired = Tokens(path).count(datetime.datetime.now(datetime.UTC))
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, ConfigError, ValueError) as error:
        return Check(name, Verdict.BAD, str(error), make)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        found = f"{path}: mode {mode:04o}: others can write themselves a token"
        return Check(name, Verdict.BAD, found, f"chmod 600 {path}")
    found = f"{path}: {total} tokens, {expired} of them expired"
    if total == expired:
        return Check(name, Verdict.BAD, f"{found}: nobody is let in", make)
    return Check(name, Verdict.GOOD, found)


def _unreadable(path: Path) -> str:
    """Why; empty: it can be read."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _host(text: str) -> str:
    try:
        return split_address(text)[0]
    except ValueError:
        return text

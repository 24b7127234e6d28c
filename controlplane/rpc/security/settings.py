"""The section `[tls]` of every daemon and client: who this process is, and whom it believes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from controlplane.rpc.addresses import is_loopback, split_address


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Files; they are read again when they change. Without any of them nothing is encrypted and nobody is asked.

    Raises:
        ValueError: files that do not go together.
    """

    ca: Path | None = None
    """Certificates of the authorities that the other side's certificate must come from, as PEM."""
    cert: Path | None = None
    """This process's certificate as PEM, with those between it and the authority. Its URI name says who it is:
    weightplane://RUN/ROLE/NAME."""
    key: Path | None = None
    """The certificate's private key, as PEM."""
    server_name: str = ""
    """As a client: the name that servers' certificates must have, where it is not in the address that is called."""
    tokens: Path | None = None
    """As a server: file of the tokens that it takes. Then it asks callers for a token and for no certificate."""
    token: Path | None = None
    """As a client: file with the token that it shows."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls.cert and tls.key go together")
        if self.cert is not None and self.ca is None:
            raise ValueError("tls.cert needs tls.ca: the authority that the other side's certificate comes from")

    @property
    def serves_tls(self) -> bool:
        return self.cert is not None

    @property
    def secured(self) -> bool:
        """Callers must prove who they are."""
        return self.serves_tls or self.tokens is not None


PLAIN = TlsSettings()
"""No TLS, no tokens."""


def check_listen(listen: str, tls: TlsSettings, insecure: bool, setting: str = "listen") -> None:
    """That not everybody on the network is let in by mistake (S2).

    Raises:
        ValueError: no address; or others reach it, and neither TLS nor `insecure` is set; or tokens would go in clear.
    """
    host, _ = split_address(listen)
    if is_loopback(host) or tls.serves_tls:
        return
    if tls.tokens is not None:
        raise ValueError(
            f"{setting}: {listen} takes tokens from other hosts, which needs TLS: set tls.cert, .key and .ca"
        )
    if not insecure:
        raise ValueError(
            f"{setting}: other hosts reach {listen}, and whoever does would be an admin. Set tls.cert, tls.key "
            "and tls.ca (weightplane certs dev DIR makes some), or listen on 127.0.0.1, or say insecure = true "
            "(--insecure) where the network itself keeps strangers out"
        )
